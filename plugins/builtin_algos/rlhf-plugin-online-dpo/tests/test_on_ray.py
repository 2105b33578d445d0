"""The same algorithms on Ray, where the other model has an engine of its own: as one process trains."""

from __future__ import annotations

import json
import tempfile

import pytest
from click.testing import CliRunner
from rlhf_authoring.learner import __file__ as learner

from rlhf_host.cli.main import main

pytest.importorskip("ray")

pytestmark = pytest.mark.timeout(900)

REWARD = ("--reward", f"{learner}:right_answer")
RUNS = {
    "xpo": ("--algo", "xpo", "--agent", "xpo", "--algo.alpha", "1e-3", *REWARD),
    "nash_md": ("--algo", "nash_md", "--agent", "nash_md", "--agent.mixture", "0.25", *REWARD),
    "a2po": ("--algo", "a2po", "--agent", "a2po", "--algo.filter-hopeless", "false", *REWARD),
    "spin": ("--algo", "spin", "--agent", "spin"),
}
COMMON = ("--actor.model", "quickstart", "--actor.lr", "1e-3", "--train.steps", "3", "--train.batch-size", "4")
COMMON += ("--rollout.n", "4", "--rollout.max-new-tokens", "4", "--train.threads", "1", "--trajectories.every", "1")
RAY = ("--runtime", "ray", "--ray.num-cpus", "4", "--ray.num-gpus", "0", "--ray.object-store-mb", "200")
AHEAD = ("--async-depth", "1", "--pipeline.schedule", "fixed")
SPLIT = ("--backend", "fsdp", "--placement", "actor+reference=2", "--placement", "rollout=1")


@pytest.fixture
def run(tmp_path):
    def run(name, *flags):
        arguments = [str(each) for each in ("train", *COMMON, "--data", "arithmetic", *flags, "--run-dir", tmp_path / name)]
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 0, result.output
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        files = sorted((tmp_path / name / "trajectories").iterdir())
        return rows, [json.loads(line) for path in files for line in path.read_text().splitlines()]

    return run


def answers(lines):
    return {line["episode_id"]: line["text"] for line in lines}


@pytest.mark.parametrize(
    ("name", "there"),
    [*((name, ()) for name in RUNS), ("xpo", SPLIT), ("xpo", ("--actor.lora.rank", "4")), ("xpo", AHEAD)],
    ids=[*RUNS, "xpo-fsdp", "xpo-lora", "xpo-ahead"],
)
def test_a_run_on_ray_trains_as_one_process(name, there, run):
    if there == SPLIT:
        pytest.importorskip("rlhf_backend_fsdp")
    with tempfile.TemporaryDirectory(prefix="rt-", dir="/tmp") as directory:
        over, lines = run("ray", *RUNS[name], *RAY, "--ray.temp-dir", directory, *there)
    here, expected = run("local", *RUNS[name], *(() if there == SPLIT else there))
    assert answers(lines) == answers(expected) != {}
    assert [row["step"] for row in over] == [1, 2, 3]
    for row, other in zip(over, here, strict=True):
        for metric in ("grad_norm", "reward/mean", "tokens", "loss/total"):
            if metric in other:
                assert row[metric] == pytest.approx(other[metric], rel=2e-3, abs=1e-5), metric


def test_answers_of_a_reference_do_not_age(run):
    """They are rows that the policy did not sample, so sampling ahead does not make them old."""
    rows, _ = run("ahead", *RUNS["xpo"], "--async-depth", "1", "--train.steps", "5")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert max(row.get("staleness/max", 0) for row in rows) == 1
