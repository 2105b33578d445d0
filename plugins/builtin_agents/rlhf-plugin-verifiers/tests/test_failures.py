"""Failures of an environment, and of the process that plays it, and what each becomes. None is a reward of 0."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rlhf_authoring import ScriptedEngine, tiny_tokenizer
from rlhf_plugin_verifiers import Verifiers, VerifiersTasks
from rlhf_plugin_verifiers.process import WORKER
from rlhf_plugin_verifiers.rows import task_of

from rlhf_host import Episode, EpisodeFailed, RunError, Sampling, Task, UserError
from rlhf_host.config.schema import RolloutConfig
from rlhf_host.plugins.manager import Loaded, PluginManager
from rlhf_host.plugins.selection import find
from rlhf_host.rollouts.endpoints import Endpoints
from rlhf_host.rollouts.episode_settings import EpisodeSettings, SampledModel
from rlhf_host.rollouts.episodes import Episodes
from rlhf_host.rollouts.gate import Gate

HERE = Path(__file__).parent
TEMPLATE = (
    "{% for message in messages %}<bos>{{ message.content }}<eos>{% endfor %}{% if add_generation_prompt %}<bos>{% endif %}"
)


@pytest.fixture(scope="session")
def python(tmp_path_factory):
    script = tmp_path_factory.mktemp("bin") / "python"
    script.write_text(f"#!{sys.executable}\n" + (HERE / "fake_python.py").read_text())
    script.chmod(0o755)
    return str(script)


def data(fault=None):
    return {"prompt": "2+3=", "answer": "5", "fault": fault}


@pytest.fixture
def play(python):
    """For each row, what the host has of its episode: trajectories, or the exception."""

    def run(rows, say="5", *, max_tokens=400, retries=0, args=None, **more):
        options = {"environment": "sums", "python": python, "args": json.dumps(args or {}), "timeout_s": 20, **more}
        agent, tokenizer = Verifiers(Verifiers.Options(**options)), tiny_tokenizer()
        tokenizer.chat_template = TEMPLATE
        said = [*tokenizer.encode(say, add_special_tokens=False), tokenizer.eos_token_id]

        async def main():
            endpoints, engine = Endpoints(), ScriptedEngine(lambda ids, key: said)
            manager = PluginManager([Loaded("agent", "verifiers", find("agent", "verifiers"), agent)])
            rollout = RolloutConfig(episode_retries=retries, episode_timeout_s=50)
            model = SampledModel(engine=Gate(engine), tokenizer=tokenizer)
            settings = EpisodeSettings(sampling=Sampling(max_new_tokens=8), max_tokens=max_tokens, rollout=rollout)
            episodes = Episodes(manager, model, settings, endpoints)
            tasks = [one if isinstance(one, Task) else task_of(one) for one in rows]
            try:
                playing = [episodes.play(Episode(f"e{n}", "g", task, sample=n)) for n, task in enumerate(tasks)]
                return await asyncio.gather(*playing, return_exceptions=True)
            finally:
                await agent.run_finished(None)
                await endpoints.close()
                manager.close()

        return asyncio.run(asyncio.wait_for(main(), 60))

    return run


def test_an_episode_is_the_policy_s_own_tokens_and_the_environment_s_reward(play):
    [[right], [wrong]] = play([data(), {**data(), "answer": "6"}])
    for row, reward, score in ((right, 1.25, 1.25 / 1.5), (wrong, 0.25, 0.25 / 1.5)):
        assert "".join(segment.kind[0] for segment in row.segments) == "pa"
        assert row.decode(row.segments[1].token_ids[:-1]) == "5"
        assert row.agent_rewards == [reward]
        assert row.score == score
        assert row.metrics == {
            "verifiers/right": reward - 0.25,
            "verifiers/short": 0.25,
            "verifiers/length": 1.0,
            "verifiers/turns": 1.0,
            "verifiers/truncated": 0.0,
        }


def test_scores_are_of_all_episodes_or_of_none(play):
    [[penalty], [plain]] = play([data("penalty"), data()], at_once=1)
    assert (penalty.score, plain.score) == (0.75, 1.25 / 1.5)
    [[plain], [above], [later]] = play([data(), data("above"), data()], at_once=1)
    assert (plain.score, above.score, later.score) == (1.25 / 1.5, None, None)
    assert above.agent_rewards == [1.25]


FAILURES = {
    # fault: whether another attempt is made, reason
    "raises": (True, "TaskError: no such file"),
    "refused": (False, "ProviderError: a bad request"),
    "late": (True, "a deadline of the environment's own: scoring"),
    "silent": (False, "the environment never asked the policy"),
    "sleeps": (True, r"no answer of the environment in 3 s \(--agent.timeout-s\)"),
}


def test_the_matrix_of_failures(play):
    """All at once, in one worker. The episode that nothing befalls is not disturbed."""
    *failures, [fine] = play([*map(data, FAILURES), data()], timeout_s=3)
    for (fault, (retryable, reason)), failure in zip(FAILURES.items(), failures, strict=True):
        assert isinstance(failure, EpisodeFailed), (fault, failure)
        with pytest.raises(EpisodeFailed, match=reason):
            raise failure
        assert failure.retryable == retryable, fault
    assert fine.agent_rewards == [1.25]


@pytest.mark.parametrize(
    ("fault", "reason"), [("nan", "the environment's reward right is nan"), ("none", "the environment gives no reward")]
)
def test_without_a_number_for_a_reward_an_episode_is_unjudged(play, fault, reason):
    [[row]] = play([data(fault)])
    assert (row.agent_rewards, row.unjudged_reason) == ([], f"verifiers: {reason}")


@pytest.mark.parametrize(
    ("fault", "names"), [("two", "solver, critic: it can play one agent"), ("judge", r"judge \(not to be trained\)")]
)
def test_the_policy_plays_one_agent_that_trains(play, fault, names):
    [error] = play([data(fault)])
    with pytest.raises(UserError, match=f"in an episode the policy plays {names}"):
        raise error


def test_a_full_conversation_leaves_no_room(play):
    [failure] = play([data("silent")], max_tokens=4)
    assert isinstance(failure, EpisodeFailed)
    [failure] = play([data()], max_tokens=4)
    assert failure.reason == "the prompt leaves no room: rollout.max_tokens is full"


@pytest.mark.parametrize("fault", ["exits", "nonsense"])
def test_a_worker_that_dies_is_started_once_more(play, tmp_path, fault):
    count = tmp_path / "count"
    first, second, third = play([data(fault), data(fault), data(fault)], at_once=1, args={"count": str(count)})
    for failure in (first, second):
        assert isinstance(failure, EpisodeFailed), failure
        assert failure.retryable
        assert "the worker died" in failure.reason
    with pytest.raises(RunError, match="the worker died a second time; the end of its log: a line of the log"):
        raise third
    assert count.read_text() == "started\n" * 2


def test_several_workers_share_the_episodes(play, tmp_path):
    count = tmp_path / "count"
    rows = play([data()] * 6, max_workers=2, at_once=2, args={"count": str(count)})
    assert [row.agent_rewards for [row] in rows] == [[1.25]] * 6
    assert count.read_text() == "started\n" * 2


def test_a_task_of_something_else(play):
    [error] = play([Task("2+3=")])
    with pytest.raises(UserError, match="is no task of verifiers: give --data verifiers"):
        raise error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"python": "nowhere/python"}, r"python nowhere/python: there is no such interpreter; make setup-verifiers"),
        ({"environment": "nowhere.py"}, "environment nowhere.py: there is no such file"),
        ({"args": "{"}, r"args '\{' is no JSON"),
        ({"args": "[]"}, r"args '\[\]': give an object"),
        ({"args": '{"start": "dies"}'}, "(?s)environment sums: the worker .*a line of the log"),
        ({"args": '{"start": "sleeps"}', "start_timeout_s": 1.0}, r"in 1 s \(.*start-timeout-s\)"),
        ({"args": '{"start": "wrong"}'}, r"python .*: verifiers cannot be imported there: none"),
    ],
)
def test_what_cannot_start_is_told_by_both_halves(python, options, message):
    given = {"environment": "sums", "python": python} | options

    async def begin():
        agent = Verifiers(Verifiers.Options(**given))
        try:
            agent.workers.open(None)
            await agent.workers.ready()
        finally:
            await agent.run_finished(None)

    with pytest.raises(
        UserError, match=f"--agent.{message}" if message[0] != "(" and not message.startswith("in") else message
    ):
        asyncio.run(begin())
    with pytest.raises(UserError, match=message):
        VerifiersTasks(VerifiersTasks.Options(**given)).load_tasks("train", 0)


def test_tasks(python):
    rows = [
        {"prompt": "a", "system_prompt": "Be brief.", "answer": "1"},
        {"prompt": [{"role": "user", "content": [{"type": "text", "text": "b"}]}, {"role": "assistant", "content": "?"}]},
        {"prompt": None},
        {"prompt": "d"},
    ]
    options = {"environment": "sums", "python": python, "args": json.dumps({"rows": rows})}

    def tasks(split, **more):
        return VerifiersTasks(VerifiersTasks.Options(**options, **more)).load_tasks(split, 0)

    system = {"role": "system", "content": "Be brief."}
    assert [task.prompt for task in tasks("train")] == [
        [system, {"role": "user", "content": "a"}],
        [{"role": "user", "content": "b"}],
        [{"role": "user", "content": "(no text)"}],
        [{"role": "user", "content": "d"}],
    ]
    assert [task.metadata["verifiers"] for task in tasks("train")] == rows
    assert [task.ground_truth for task in tasks("train", size=2)] == ["1", None]
    with pytest.raises(
        UserError,
        match=r"give --data\.verifiers\.size N with --data\.verifiers\.eval-size M .*, or --data\.verifiers\.eval-args",
    ):
        tasks("eval")
    assert [task.prompt[-1]["content"] for task in tasks("eval", size=2, eval_size=5)] == ["(no text)", "d"]
    assert len(tasks("eval", eval_args=options["args"])) == 4
    with pytest.raises(UserError, match="it has no tasks for the split eval"):
        tasks("eval", size=4, eval_size=1)
    with pytest.raises(UserError, match=r"eval-size needs --data\.verifiers\.size"):
        tasks("eval", eval_size=1)


def test_secrets_are_passed_on_by_name_only(python, monkeypatch):
    address, secret = "https://pypi.corp/simple", "https://user:pw@pypi.corp/simple"
    plain = {"HF_HOME": "b", "UV_INDEX_URL": address, "PIP_INDEX_URL": "https://pypi.corp/@simple"}
    hidden = {"HF_TOKEN": "a", "WANDB_API_KEY": "d", "UV_HTTP_BASIC_AUTH": "e", "PIP_CREDENTIALS": "f", "HF_COOKIE": "g"}
    hidden |= {"UV_INDEX": f"corp={secret}", "PIP_EXTRA_INDEX_URL": f"{address} https://token@corp", "UV_proxy_password": "h"}
    for name, value in (plain | hidden | {"JUDGE_KEY": "c"}).items():
        monkeypatch.setenv(name, value)
    given = {"environment": "sums", "python": python}
    place = Verifiers(Verifiers.Options(**given, env=["JUDGE_KEY"])).workers.place
    assert plain.keys() | {"JUDGE_KEY"} <= place.variables.keys()
    assert not hidden.keys() & place.variables.keys()
    place = Verifiers(Verifiers.Options(**given, env=["UV_INDEX"])).workers.place
    assert place.variables["UV_INDEX"] == f"corp={secret}"


def busy_package(folder):
    """Stands for verifiers: writes the worker's process id, and never comes back."""
    package = folder / "verifiers"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "v1.py").write_text(
        f"import os\nopen({str(folder / 'worker')!r}, 'w').write(str(os.getpid()))\nwhile True: pass\n"
    )
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nexec env PYTHONPATH={folder} {sys.executable} "$@"\n')
    script.chmod(0o755)
    return str(script)


def wait_for_end(process):
    until = time.monotonic() + 20
    while process.exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not process.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="children are found in /proc")
def test_a_worker_that_is_late_with_the_tasks_ends(tmp_path):
    options = VerifiersTasks.Options(environment="x", python=busy_package(tmp_path), start_timeout_s=2.0)
    with pytest.raises(UserError, match="no tasks in 2 s"):
        VerifiersTasks(options).load_tasks("train", 0)
    wait_for_end(Path(f"/proc/{(tmp_path / 'worker').read_text()}"))


@pytest.mark.skipif(sys.platform != "linux", reason="children are found in /proc")
def test_a_worker_ends_with_the_process_that_watches_it(tmp_path):
    process = subprocess.Popen([busy_package(tmp_path), WORKER], stdin=subprocess.PIPE)
    process.stdin.write(json.dumps({"op": "tasks", "environment": "x", "args": {}}).encode() + b"\n")
    process.stdin.flush()
    until = time.monotonic() + 20
    while not (tmp_path / "worker").exists() and time.monotonic() < until:
        time.sleep(0.05)
    process.kill()
    process.communicate()
    wait_for_end(Path(f"/proc/{(tmp_path / 'worker').read_text()}"))


@pytest.mark.skipif(sys.platform != "linux", reason="children are found in /proc")
def test_a_worker_ends_with_whoever_started_it(tmp_path):
    """Also one that is busy, and so does not see the end of its input; with what it started, in whatever session."""
    package = tmp_path / "verifiers"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "v1.py").write_text(
        "import subprocess, time\n"
        "child = subprocess.Popen(['sleep', '321'], start_new_session=True)\n"
        f"open({str(tmp_path / 'child')!r}, 'w').write(str(child.pid))\n"
        "time.sleep(300)\n"
    )
    starter = (
        "import json, os, subprocess, sys, time\n"
        "from rlhf_plugin_verifiers.process import WORKER\n"
        "process = subprocess.Popen([sys.executable, WORKER], stdin=subprocess.PIPE, start_new_session=True)\n"
        "process.stdin.write(json.dumps({'op': 'serve', 'environment': 'x', 'args': {}}).encode() + b'\\n')\n"
        "process.stdin.flush()\n"
        f"while not os.path.exists({str(tmp_path / 'child')!r}): time.sleep(0.05)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    subprocess.run([sys.executable, "-c", starter], env={**os.environ, "PYTHONPATH": paths}, timeout=60)
    wait_for_end(Path(f"/proc/{(tmp_path / 'child').read_text()}"))
