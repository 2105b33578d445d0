"""``rlhf serve``: the real command, a real client, and its end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import openai
import pytest

pytest.importorskip("aiohttp")


@contextlib.contextmanager
def serving(tmp_path, *arguments):
    """The command as a process, and what it printed to reach it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "rlhf_host.cli.main", "serve", *map(str, arguments), "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    settings = dict(process.stdout.readline().strip().partition("=")[::2] for _ in range(2))
    yield process, settings
    process.kill()
    process.communicate()


@pytest.fixture
def served(tiny_model, tmp_path):
    with serving(tmp_path, tiny_model, "--rollout.max-new-tokens", "6") as (process, settings):
        yield process, settings


def test_a_run_is_served_with_its_settings(rlhf, small_run, tmp_path):
    run = tmp_path / "run"
    every = ("--checkpoint.every", "1", "--checkpoint.keep", "2")
    rlhf.run(*small_run, "--train.steps", "2", *every, "--rollout.max-new-tokens", "3", "--run-dir", run)
    with serving(tmp_path, run, "--checkpoint", "1") as (process, settings):
        with openai.OpenAI(base_url=settings["OPENAI_BASE_URL"], api_key=settings["OPENAI_API_KEY"]) as client:
            assert len(client.completions.create(model="policy", prompt="1+1=", max_tokens=20).choices[0].token_ids) <= 3
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=30)
    assert f"Serving {run}/checkpoints/step-000001/model as policy" in told


def test_a_model_is_served_until_ctrl_c(served):
    process, settings = served
    with openai.OpenAI(base_url=settings["OPENAI_BASE_URL"], api_key=settings["OPENAI_API_KEY"]) as client:
        ask = {"model": "policy", "prompt": "1+1="}
        greedy = [client.completions.create(**ask, temperature=0).choices[0] for _ in range(2)]
        assert greedy[0].token_ids == greedy[1].token_ids, "clients choose the distribution"
        assert len({tuple(client.completions.create(**ask, n=4).choices[n].token_ids) for n in range(4)}) > 1
    with (
        openai.OpenAI(base_url=settings["OPENAI_BASE_URL"], api_key="wrong") as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=30)
    assert process.returncode == 0, told
    assert told.rstrip().endswith("Ended.")


@pytest.mark.parametrize(
    ("command", "setting", "taken"),
    [
        ("serve", "--reward", "--rollout.temperature"),
        ("chat", "--agent", "--data.system-prompt"),
        ("serve-reward", "--rollout.temperature", "--rollout.max-tokens"),
        ("data show", "--algo", "--data.format"),
    ],
)
def test_settings_that_a_command_does_not_use_are_refused_and_not_listed(rlhf_here, command, setting, taken):
    shown = rlhf_here(*command.split(), "--help").output
    words = shown.split()
    assert taken in words
    assert setting not in words
    result = rlhf_here(*command.split(), "MODEL", setting, "x")
    assert (result.exit_code, f"{setting}: rlhf {command} does not use it; it takes --" in result.output) == (2, True)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "no model is given: rlhf serve MODEL"),
        (["MODEL", "--port", "x"], "--port x: should be a whole number from 0 to 65535"),
        (["MODEL", "--host", "0.0.0.0"], "give --key-file FILE with a key of your own"),
        (["MODEL", "--key-file", "short"], "a key has at least 16 characters; this one has 3"),
        (["nowhere"], "nowhere"),
        (
            ["MODEL", "--train.steps", "5"],
            "--train.steps: rlhf serve does not use it; it takes --train.threads, --train.autocast",
        ),
        (["MODEL", "--agent", "multi_turn"], "--agent: rlhf serve does not use it; it takes --actor.*, --seed"),
        (["MODEL", "--roles.actor.lr", "1"], "--roles.actor.lr: rlhf serve does not use it; it takes --actor.model"),
        (["MODEL", "--data", "FILE"], "--data: rlhf serve does not use it; it takes --data.template"),
        (["MODEL", "--kl.coef", "1"], "--kl.coef: rlhf serve does not use it"),
        (["MODEL", "--rollout.temprature", "1"], "no such flag; did you mean '--rollout.temperature'"),
    ],
)
def test_what_cannot_be_served(rlhf_here, tiny_model, tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short").write_text("abc\n")
    result = rlhf_here("serve", *(str(tiny_model) if word == "MODEL" else word for word in flags))
    assert result.exit_code == 2
    assert message in result.output
