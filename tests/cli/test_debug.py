"""``--debug``: every hook runs on the main thread, so that a debugger works in it, and the numbers stay what they are."""

import json
import subprocess
from pathlib import Path

import pytest

PLUGINS = '''"""Plugins that say on which thread they are called, or stop in a debugger."""
import asyncio, json, os, threading
from pydantic import BaseModel
from rlhf_host import Advantages, LossTerm, Needs, Output, RoleNeed, Step, hookimpl

def seen(hook):
    with open(os.environ["SEEN"], "a") as file:
        others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
        names = [thread.name for thread in others if not isinstance(thread, threading.Timer)]  # these only print a line
        on_main = threading.current_thread() is threading.main_thread()
        names = {name.split("_")[0].partition("-")[2] or name for name in names}
        file.write(json.dumps([hook, on_main, sorted(names)]) + "\\n")

class Plugin:
    class Options(BaseModel):
        pass
    def __init__(self, options):
        pass

class Watch(Plugin):
    @hookimpl
    def needs(self):
        actor = RoleNeed("actor", trainable=True, source=None)
        return Needs(data="prompts", roles=(actor,), outputs=(Output("logprobs", role="actor"),))
    @hookimpl
    def run_started(self, context):
        seen("run_started")
    @hookimpl
    def compute_advantages(self, experience):
        seen("compute_advantages")
        return Advantages(experience.action_mask * experience.rewards[:, None])
    @hookimpl
    def compute_loss(self, role, outputs, batch):
        seen("compute_loss")
        yield LossTerm("watch", -batch.advantages * outputs.logprobs)
    @hookimpl
    def step_finished(self, step, metrics):
        seen("step_finished")

class Look(Plugin):
    @hookimpl
    def run_started(self, context):
        self.context = context
    @hookimpl
    def score(self, trajectories):
        seen("score")
        return [len(t.text) / 8 for t in trajectories]

class LookAsync(Plugin):
    @hookimpl
    async def score(self, trajectories, context):
        found = await context.roles["actor"].logprobs(trajectories)
        await asyncio.sleep(0)
        seen("async score")
        return [float(len(row)) for row in found]

class Turn(Plugin):
    @hookimpl
    def agent_reset(self, episode):
        seen("agent_reset")
        return Step()
    @hookimpl
    def agent_step(self, episode, action):
        seen("agent_step")
        return Step(done=True)

class Stop(Plugin):
    @hookimpl
    def score(self, trajectories):
        answers = [t.text for t in trajectories]
        breakpoint()
        return [1.0 * t.sample for t in trajectories]
'''

ENTRY_POINTS = """
[rlhf.algos]
watch = stopping:Watch
[rlhf.rewards]
look = stopping:Look
look_async = stopping:LookAsync
stop = stopping:Stop
[rlhf.agents]
turn = stopping:Turn
"""


@pytest.fixture(scope="module")
def stopping(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("stopping")
    about = root / "stopping-1.0.dist-info"
    about.mkdir()
    (root / "stopping.py").write_text(PLUGINS)
    (about / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: stopping\nVersion: 1.0\nRequires-Dist: rlhf-host>=0.10,<0.11\n"
    )
    (about / "entry_points.txt").write_text(ENTRY_POINTS)
    return root


@pytest.fixture
def run(fork, environment, stopping, tiny_model, prompts, tmp_path):
    """The real command line, with something to say to a debugger."""

    def start(*flags, say="", code=0, command="train"):
        own = {**environment, "PYTHONPATH": str(stopping), "SEEN": str(tmp_path / "seen")}
        small = ["--actor.model", tiny_model, "--data", prompts, "--rollout.n", "2", "--rollout.max-new-tokens", "4"]
        small += ["--train.batch-size", "2", "--train.steps", "1", "--tracker", "console=none"]
        small += ["--run-dir", tmp_path / "run"] if command == "train" else []
        process = fork([command, *map(str, [*small, *flags])], own, tmp_path)
        out, err = process.communicate(say, timeout=300)
        assert process.returncode == code, f"{out}\n{err}"
        return subprocess.CompletedProcess(process.args, code, out, err)

    return start


WATCHED = ("--algo", "watch", "--reward", "look", "--reward", "look_async", "--agent", "turn")


def hooks(path: Path) -> dict[str, bool]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {hook: all(main for name, main, _ in rows if name == hook) for hook in {row[0] for row in rows}}


def test_all_hooks_run_on_the_main_thread(run, tmp_path):
    run(*WATCHED, "--debug")
    found = hooks(tmp_path / "seen")
    expected = {"run_started", "compute_advantages", "compute_loss", "step_finished", "score", "async score"}
    assert found == dict.fromkeys(expected | {"agent_reset", "agent_step"}, True)
    threads = {name for line in (tmp_path / "seen").read_text().splitlines() for name in json.loads(line)[2]}
    assert threads <= {"engine"}, "the engine's own thread only hands its work over"


def test_otherwise_they_do_not(run, tmp_path):
    """The contrast: without the flag scoring waits in threads."""
    run(*WATCHED)
    found = hooks(tmp_path / "seen")
    assert {name for name, main in found.items() if not main} >= {"score", "agent_step", "async score", "compute_loss"}


def test_a_breakpoint_in_a_reward_opens_the_debugger(run):
    say = "p 'answers', len(answers)\nw\nc\np 'again', len(answers)\nc\n"
    done = run("--algo", "rloo", "--reward", "stop", "--debug", say=say)
    assert "('answers', 2)" in done.stdout
    assert "stopping.py(" in done.stdout, "the stack shows where it stands"
    assert "('again', 2)" in done.stdout
    assert "Finished" in done.stdout


def test_what_is_changed_in_the_debugger_counts(run, tmp_path):
    say = "for t in trajectories: t.sample = 40\n\nc\nfor t in trajectories: t.sample = 40\n\nc\n"
    run("--algo", "rloo", "--reward", "stop", "--debug", say=say)
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert row["reward/mean"] == 40


def test_leaving_the_debugger_ends_the_run(run):
    done = run("--algo", "rloo", "--reward", "stop", "--debug", say="q\n", code=130)
    assert "Interrupted" in done.stderr
    assert "Traceback" not in done.stderr


def test_other_commands_take_it_too(run, tmp_path):
    run("--reward", "look", "--debug", command="eval")
    run("--reward", "look", "--debug", "--output", "saved.jsonl", command="rollout")
    assert hooks(tmp_path / "seen") == {"score": True}


def test_the_numbers_are_the_same(rlhf_here, small_run, tmp_path):
    for name, flags in (("plain", ()), ("debug", ("--debug",))):
        result = rlhf_here(*small_run, "--train.steps", "2", "--run-dir", tmp_path / name, *flags)
        assert result.exit_code == 0, result.output
    plain, debug = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("plain", "debug")
    )
    for name in ("loss", "grad_norm", "reward/mean", "mismatch/max", "entropy"):
        assert [row[name] for row in debug] == [row[name] for row in plain]


def test_what_lives_in_other_processes_gives_way(rlhf_here, small_run, caplog):
    from ruamel.yaml import YAML

    result = rlhf_here(*small_run, "--runtime", "ray", "--engine", "vllm", "--sync", "broadcast", "--debug", "--print-config")
    assert result.exit_code == 0, result.output
    config = YAML(typ="safe").load(result.stdout)
    assert [config[key]["name"] for key in ("runtime", "engine", "sync")] == ["local", "transformers", "in_process"]
    assert [record.message for record in caplog.records] == [
        "--debug: a debugger cannot follow engine vllm; transformers is used instead",
        "--debug: a debugger cannot follow runtime ray; local is used instead",
    ]


def test_inside_a_running_loop_it_is_refused(tiny_model, prompts, reward_plugins, monkeypatch):
    import asyncio

    import rlhf_host

    monkeypatch.syspath_prepend(str(reward_plugins))

    async def notebook():
        rlhf_host.evaluate(model=tiny_model, data=str(prompts), rewards="vowels", debug=True)

    with pytest.raises(rlhf_host.UserError, match="in this thread, which has one already, as in a notebook"):
        asyncio.run(notebook())
