"""Real runs of three steps, and what options and corrections are refused."""

from __future__ import annotations

import json

import pytest

import rlhf_host
from rlhf_host import Needs, Step, UserError, hookimpl

DATA = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a, b in ((17, 35), (38, 26), (41, 29), (56, 17))]
FIXED = {"train.threads": 1, "actor.model": "quickstart", "rollout.max_new_tokens": 4, "n": 8, "batch_size": 4, "steps": 3}


def right(text, label):
    return float(text.strip() == label)


def train(run, algo, **more):
    judged = {} if "agent" in more else {"reward": right}
    rlhf_host.train(algo=algo, data=DATA, run_dir=str(run), lr=1e-4, **{**FIXED, **judged, **more})
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("algo", ["gmpo", "luspo", "maxrl", "opo", "vespo"])
def test_a_run_learns_over_two_updates_a_step(tmp_path, algo):
    rows = train(tmp_path / "run", algo, **{"train.epochs": 2})
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert any(row["grad_norm"] > 0 for row in rows)


class Twice:
    """The policy answers, is told to look again, and answers again; each right answer earns 1."""

    @hookimpl
    def needs(self):
        return Needs(rewards=False)

    @hookimpl
    def agent_reset(self, episode):
        return Step()

    @hookimpl
    def agent_step(self, episode, action):
        earned = float(action.text.strip() == episode.task.ground_truth)
        return Step(f" {episode.task.prompt}", reward=earned, done=episode.turn > 0)


def test_gigpo_compares_turns_that_met_the_same_state(tmp_path):
    rows = train(tmp_path / "run", "gigpo", agent=Twice(), **{"rollout.max_tokens": 64})
    assert all(row["gigpo/shared_states"] == 1.0 for row in rows)
    assert any(row["grad_norm"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("algo", "more", "said"),
    [
        ("vespo", {"extensions": ["tis"]}, "tis"),
        ("gmpo", {"extensions": ["tis"]}, "tis"),
        ({"name": "gmpo", "clip_eps": 0}, {}, "clip_eps"),
        ({"name": "maxrl", "std": "group"}, {}, "std"),
    ],
)
def test_what_has_no_effect_is_refused(tmp_path, algo, more, said):
    if more:
        pytest.importorskip("rlhf_plugin_off_policy")
    with pytest.raises(UserError, match=said):
        train(tmp_path / "run", algo, **more)
    assert not (tmp_path / "run").exists()
