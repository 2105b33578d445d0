"""Filtering and overlong handling against hand-worked cases, and a run that shows what was dropped."""

import importlib.metadata
import inspect
import json
import subprocess
import sys

import pytest
import rlhf_plugin_dapo as dapo
import torch
from click.testing import CliRunner
from pydantic import ValidationError
from rlhf_authoring import extension_contract
from rlhf_authoring.models import write_tiny_model
from rlhf_authoring.tensors import make_batch
from rlhf_plugin_dapo import DynamicFiltering, OverlongMasking, OverlongPenalty, StopProperly

from rlhf_host import Drop, Group, Task, Trajectory, UserError
from rlhf_host.cli.main import main

TestDynamicFiltering = extension_contract("dynamic_filtering")
TestOverlongMasking = extension_contract("overlong_masking")
TestOverlongPenalty = extension_contract("overlong_penalty")
TestStopProperly = extension_contract("stop_properly")


def group(scores=None, rewards=None, episodes=None):
    count = len(scores or rewards)
    trajectories = [
        Trajectory(
            f"e{episodes[i] if episodes else i}",
            "g",
            Task("?"),
            [],
            score=scores[i] if scores else None,
            reward=rewards[i] if rewards else scores[i],
        )
        for i in range(count)
    ]
    return Group("g", Task("?"), trajectories)


def verdict(group, **options):
    found = DynamicFiltering(DynamicFiltering.Options(**options)).keep_group(group)
    return found.reason if isinstance(found, Drop) else found


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([0.0, 1.0, 1.0], True),
        ([0.0, 0.0, 0.0], "too_hard"),
        ([1.0, 1.0], "too_easy"),
        ([0.5, 0.5], "no_spread"),
        ([0.5, 0.25], True),
        ([0.3], "alone"),
    ],
)
def test_groups_are_kept_between_none_and_all_right(scores, expected):
    assert verdict(group(scores)) == expected


def test_the_bounds_are_strict():
    half = group([0.0, 1.0])
    assert verdict(half, low=0.5) == "too_hard"
    assert verdict(half, high=0.5) == "too_easy"
    assert verdict(half, low=0.49, high=0.51) is True


def test_an_episodes_trajectories_count_once():
    """By trajectories the mean is 0.25, by episodes 0.5."""
    scores, episodes = [0.0, 0.0, 0.0, 1.0], [0, 0, 0, 1]
    assert verdict(group(scores, episodes=episodes), low=0.4) is True
    assert verdict(group(scores), low=0.4) == "too_hard"
    assert verdict(group([0.0, 1.0], episodes=[0, 0])) == "alone"


def test_without_scores_the_rewards_spread_decides():
    assert verdict(group(rewards=[0.1] * 8)) == "no_spread"
    assert verdict(group(rewards=[1e6, 1e6 + 0.5])) == "no_spread"
    assert verdict(group(rewards=[-3.0, -3.1])) is True
    partly = group([1.0, 1.0], rewards=[1.0, 0.5])
    partly.trajectories[1].score = None
    assert verdict(partly) is True


def test_bounds_without_scores_to_compare_are_refused():
    with pytest.raises(UserError, match="low and high are bounds of 0-1 scores, and the rewards give none: use min_std alone"):
        verdict(group(rewards=[0.0, 1.0]), high=0.9)


def test_min_std_is_unbiased_and_comes_after_the_scores():
    assert verdict(group(rewards=[0.0, 1.0]), min_std=0.70) is True
    assert verdict(group(rewards=[0.0, 1.0]), min_std=0.71) == "no_spread"
    assert verdict(group([0.0, 0.0], rewards=[5.0, -5.0]), min_std=0.1) == "too_hard"
    assert verdict(group([0.0, 1.0], rewards=[0.2, 0.2]), min_std=0.0) == "no_spread"
    assert verdict(group([0.0, 1.0], rewards=[0.3, 0.1 + 0.2]), min_std=0.0) == "no_spread"


def test_bounds_that_keep_nothing_are_refused():
    with pytest.raises(ValidationError, match=r"low 0\.6 is not below high 0\.6"):
        DynamicFiltering.Options(low=0.6, high=0.6)


def test_filtering_is_refused_where_nothing_gives_a_reward():
    plugin = DynamicFiltering(DynamicFiltering.Options())
    config = {"reward": {}, "agent": {"name": "single_turn"}, "from_trajectories": None}
    with pytest.raises(UserError, match="the run has no reward: give --reward NAME, or leave it out"):
        plugin.check_run(config)
    for given in ({"reward": {"format": {}}}, {"agent": {"name": "textarena"}}, {"from_trajectories": "run"}):
        plugin.check_run(config | given)


# --- rewards ------------------------------------------------------------------------------------


def penalised(batch, **options):
    return OverlongPenalty(OverlongPenalty.Options(**options)).transform_rewards(batch, batch.rewards)


def test_the_penalty_grows_over_the_buffer():
    """DAPO's numbers, a thousandth of their size: free until 16, then to -1 at 20."""
    batch = make_batch([10, 16, 18, 20], rewards=[1.0, 1.0, 0.0, -1.0])
    assert penalised(batch, buffer=4, max_length=20).tolist() == pytest.approx([1.0, 1.0, -0.5, -2.0])
    assert penalised(batch).tolist() == penalised(batch, buffer=4, max_length=20).tolist()
    assert penalised(batch, buffer=4, max_length=20, factor=0.5).tolist() == pytest.approx([1.0, 1.0, -0.25, -1.5])


def test_beyond_the_longest_answer_the_penalty_stays():
    batch = make_batch([30, 12], rewards=[0.0, 0.0])
    assert penalised(batch, buffer=8, max_length=16).tolist() == pytest.approx([-1.0, -0.5])


def test_observations_have_no_length():
    batch = make_batch([12, 12], rewards=[0.0, 0.0], observations=True)  # every third token
    batch.action_mask[1] = batch.completion_mask[1]
    assert penalised(batch, buffer=4, max_length=12).tolist() == pytest.approx([0.0, -1.0])


def test_rewards_of_a_million_and_permutation():
    batch = make_batch([10, 16, 18, 20], rewards=[1e6, -1e6, 1e6, 0.0])
    found = penalised(batch, buffer=4, max_length=20)
    assert found.isfinite().all()
    order = [2, 0, 3, 1]
    assert torch.equal(penalised(batch.select(order), buffer=4, max_length=20), found[order])


def test_a_buffer_longer_than_the_answer_is_refused():
    with pytest.raises(UserError, match="buffer 4096 is longer than the longest answer of 6 tokens: lower it"):
        penalised(make_batch([6, 6]), buffer=4096)


def test_truncated_rows_leave_the_loss_and_nothing_else():
    batch = make_batch([3, 4, 2, 4], observations=True)
    batch.truncated[1] = True
    mask = OverlongMasking(OverlongMasking.Options()).loss_masks(batch)
    assert not mask[1].any()
    assert mask[[0, 2, 3]].equal(batch.action_mask[[0, 2, 3]])


def test_stopping_properly_keeps_part_of_a_truncated_positive_reward():
    batch = make_batch([2, 2, 2, 2], rewards=[1.0, 1.0, -1.0, 0.5])
    batch.truncated = torch.tensor([False, True, True, True])
    scale = StopProperly(StopProperly.Options(coef=0.25)).transform_rewards
    assert scale(batch, batch.rewards).tolist() == [1.0, 0.25, -1.0, 0.125]
    assert StopProperly(StopProperly.Options()).transform_rewards(batch, batch.rewards).tolist() == [1.0, 0.0, -1.0, 0.0]


# --- as a package -------------------------------------------------------------------------------


def test_the_plugins_are_found_by_name_and_light_to_import():
    found = {e.name: e.load() for e in importlib.metadata.entry_points(group="rlhf.extensions")}
    named = {"dynamic_filtering": DynamicFiltering, "overlong_penalty": OverlongPenalty}
    named |= {"overlong_masking": OverlongMasking, "stop_properly": StopProperly}
    assert {name: found.get(name) for name in named} == named
    assert len([line for line in inspect.getsource(dapo).splitlines() if line.strip()]) < 150
    script = "import sys, rlhf_plugin_dapo; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def run(tiny, tmp_path):
    """Two steps that end each answer at its first token or run out after four; the model's right answers are chance."""
    rows = [{"prompt": f"{i}=", "label": str(i % 10)} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for other in ("rlhf_plugin_rloo", "rlhf_plugin_math_verifier"):
        pytest.importorskip(other, reason="a whole run needs an algorithm and a reward")
    flags = ["train", "--algo", "rloo", "--reward", "math_verifier", "--actor.model", tiny, "--data", tmp_path / "rows.jsonl"]
    flags += ["--rollout.n", "4", "--rollout.max-new-tokens", "4", "--train.batch-size", "2", "--train.steps", "2"]
    flags += ["--train.threads", "1", "--run-dir", tmp_path / "run"]

    def invoke(*more):
        return CliRunner().invoke(main, [str(flag) for flag in [*flags, *more]])

    return invoke


def test_a_run_drops_groups_says_why_and_corrects(run, tmp_path):
    pytest.importorskip("rlhf_plugin_off_policy")
    result = run("--with", "tis", "--with", "dynamic_filtering", "--with", "overlong_penalty", "--rollout.max-refills", "40")
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        assert row["rollout/drawn"] == row["rollout/groups"] + row["rollout/dropped"]
        assert row["groups/no_variance"] == 0.0
        assert 0.0 < row["score/mean"] < 1.0
        assert row["correction/ess"] == pytest.approx(1.0, abs=1e-4)
    assert sum(row.get("rollout/dropped/too_hard", 0) for row in rows) > 0


def test_filtering_needs_groups_and_the_penalty_a_buffer_that_fits(run):
    result = run("--with", "dynamic_filtering", "--rollout.n", "1")
    assert result.exit_code == 2
    assert "extension:dynamic_filtering needs groups of 2 or more, and rollout.n is 1: set --rollout.n 2" in result.stderr
    result = run("--with", "overlong_penalty", "--with.overlong-penalty.buffer", "4096")
    assert result.exit_code == 2, result.output
    assert "buffer 4096 is longer than the longest answer of 4 tokens: lower it" in result.stderr
