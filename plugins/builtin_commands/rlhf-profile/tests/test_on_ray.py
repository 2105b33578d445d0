"""Runs over several processes: two ranks and an engine of their own."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from rlhf_authoring.learner import __file__ as learner
from rlhf_profile.command import profile

from rlhf_host.commands import main

from .trace_rules import refuse_broken

pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two steps on Ray, of which the second is recorded."""
    folder = tmp_path_factory.mktemp("ray")
    data = folder / "sums.jsonl"
    data.write_text(
        "".join(json.dumps({"prompt": f"{a}+{b}=", "label": str(a + b)}) + "\n" for a in range(11, 19) for b in (23, 35))
    )
    flags = {
        "algo": f"{learner}:Learner",
        "reward": f"{learner}:right_answer",
        "actor.model": "quickstart",
        "data": data,
        "rollout.n": 4,
        "rollout.max-new-tokens": 4,
        "train.batch-size": 8,
        "train.steps": 2,
        "runtime": "ray",
        "ray.num-cpus": 4,
        "ray.num-gpus": 0,
        "ray.object-store-mb": 200,
        "checkpoint.final": "false",
        "profile.steps": "2",
        "run-dir": folder / "run",
    }
    words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    done = CliRunner().invoke(main, ["train", *words, "--placement", "actor=2", "--placement", "rollout=1"])
    assert done.exit_code == 0, done.output
    return folder / "run", done.output


def test_every_process_has_a_trace_and_a_place_on_the_timeline(run):
    directory, output = run
    folder = directory / "profiles/step-000002"
    names = {"controller", "trainer-rank-0", "trainer-rank-1", "engine-0"}
    assert {path.name.partition(".")[0] for path in folder.glob("*.trace.json.gz")} == names
    assert "Longest operations (cpu" in output
    timeline = json.loads((folder / "timeline.json").read_text())
    refuse_broken(timeline)
    pids = {
        event["pid"]: event["args"]["name"].partition(" (")[0]
        for event in timeline["traceEvents"]
        if event["name"] == "process_name"
    }
    assert list(pids.values()) == ["controller", "trainer rank 0", "trainer rank 1", "engine 0"]
    spans = {(pids[event["pid"]], event["name"]) for event in timeline["traceEvents"] if event["ph"] == "X"}
    assert {(f"trainer rank {rank}", name) for rank in (0, 1) for name in ("pass actor", "optimizer actor", "waits")} <= spans
    assert ("engine 0", "generate") in spans
    assert any(who == "controller" and name.startswith("engine 0, ") for who, name in spans)
    assert {("controller", name) for name in ("step", "rollout", "train", "sync", "score", "request")} <= spans
    assert any(who == "engine 0" and name.startswith("call rlhf_host.") for who, name in spans), "it takes the weights"


def test_work_that_depends_on_other_work_comes_after_it(run):
    """All on one clock: an engine samples inside of the controller's phase, ranks train inside of theirs."""
    timeline = json.loads((run[0] / "profiles/step-000002/timeline.json").read_text())
    pids = {
        event["pid"]: event["args"]["name"].partition(" (")[0]
        for event in timeline["traceEvents"]
        if event["name"] == "process_name"
    }
    spans = [
        (pids[event["pid"]], event["name"], event["ts"], event["ts"] + event["dur"])
        for event in timeline["traceEvents"]
        if event["ph"] == "X"
    ]
    phases = {
        name: (begun, ended)
        for who, name, begun, ended in spans
        if who == "controller" and name in ("rollout", "train", "sync")
    }
    for who, name, begun, ended in spans:
        phase = {"generate": "rollout", "pass actor": "train", "optimizer actor": "train"}.get(name)
        if phase == "rollout" and begun > phases["train"][0]:
            continue  # a probe of the weights after the sync
        if phase is not None:
            assert phases[phase][0] - 1000 <= begun <= ended <= phases[phase][1] + 1000, (who, name)


def test_the_command_says_what_each_process_did(run):
    shown = CliRunner().invoke(profile, [str(run[0])]).output
    assert "  trainer rank 1: trains " in shown
    assert "  engine 0: samples " in shown
