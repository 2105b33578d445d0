"""``rlhf chat``: lines in, answers out."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys

import pytest


def talk(model, lines, *flags):
    command = [sys.executable, "-m", "rlhf_host.cli.main", "chat", str(model), "--rollout.temperature", "0", *flags]
    return subprocess.run(
        command, input="".join(f"{line}\n" for line in lines), capture_output=True, text=True, timeout=100, check=False
    )


def test_lines_are_messages_and_an_empty_one_begins_anew():
    done = talk("quickstart", ["12+34=", "", "12+34=", "%"])
    assert done.returncode == 0, done.stderr
    answers = done.stdout.split()
    assert len(answers) == 2
    assert answers[0] == answers[1]
    assert "(a new conversation)" in done.stderr
    assert "kernels" not in done.stderr, "nothing trains"
    assert "> the tokenizer has no tokens for the text '%'; an empty" in done.stderr, (
        "it cannot be said, and the conversation stays"
    )


def test_ctrl_c_ends_it_at_once():
    command = [sys.executable, "-m", "rlhf_host.cli.main", "chat", "quickstart"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdin.write("1+1=\n")
    process.stdin.flush()
    assert process.stdout.readline()
    process.send_signal(signal.SIGINT)
    process.wait(timeout=20)
    assert process.returncode == 0
    assert process.stderr.read().rstrip().endswith("Ended.")
    process.stdin.close()


@pytest.mark.parametrize(
    ("words", "message"), [([], "no model is given: rlhf chat MODEL"), (["nowhere"], "no model 'nowhere': no such directory")]
)
def test_no_model(rlhf_here, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    result = rlhf_here("chat", *words)
    assert result.exit_code == 2
    assert message in result.output


def test_a_runs_model_is_asked_as_in_training(rlhf, rlhf_here, small_run, tmp_path):
    run, copy = tmp_path / "run", tmp_path / "copy"
    settings = ("--rollout.max-new-tokens", "5", "--data.system-prompt", "Count.")
    rlhf.run(
        *small_run,
        *settings,
        "--train.steps",
        "2",
        "--actor.lora.rank",
        "4",
        "--checkpoint.every",
        "1",
        "--checkpoint.keep",
        "2",
        "--run-dir",
        run,
    )
    shutil.copytree(run / "model", copy)
    asked = [talk(run, ["1+1="]), talk(copy, ["1+1="], *settings), talk(run, ["1+1="], "--checkpoint", "last")]
    assert [done.returncode for done in asked] == [0, 0, 0], asked[0].stderr
    assert len({done.stdout for done in asked}) == 1
    assert talk(copy, ["1+1="], *settings[:2]).stdout != asked[0].stdout, "the system message counts"
    assert talk(copy, ["1+1="], *settings[2:]).stdout != asked[0].stdout, "so does the length"
    about = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(about | {"status": "interrupted"}))
    assert f"{run}/checkpoints/step-000002/model: the run has not finished" in talk(run, []).stderr
    for words, message in (
        (["--checkpoint", "9"], "has no checkpoint of step 9; it has those of steps 1, 2"),
        (["--config", "rloo"], "is a run's model, and uses the run's own settings: leave --config out"),
    ):
        result = rlhf_here("chat", run, *words)
        assert (result.exit_code, message in result.output) == (2, True), result.output
    result = rlhf_here("chat", copy, "--checkpoint", "best")
    assert (result.exit_code, "chooses one of a run: rlhf chat RUN_DIR --checkpoint best" in result.output) == (2, True)


def test_a_reward_model_writes_no_text(rlhf, rlhf_here, tiny_model, tmp_path):
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps({"prompt": "1+1=", "chosen": "2", "rejected": "3"}) + "\n")
    train = (
        "train",
        "--algo",
        "rm",
        "--actor.model",
        tiny_model,
        "--data",
        pairs,
        "--train.batch-size",
        "1",
        "--kernels",
        "none",
    )
    rlhf.run(*train, "--run-dir", tmp_path / "run")
    result = rlhf_here("chat", tmp_path / "run")
    assert result.exit_code == 2
    assert f"{tmp_path}/run/model has a scalar head and writes no text" in result.output
    assert "serve-reward" in result.output
