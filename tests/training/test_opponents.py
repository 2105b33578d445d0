"""Frozen models that agents talk to: ``policy.role``."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from pydantic import BaseModel

import rlhf_host
from rlhf_host import Needs, RoleNeed, UserError, hookimpl


class Game:
    """The policy and its opponent both continue the prompt; another answer wins."""

    class Options(BaseModel):
        opponent: str = "opponent"

    def __init__(self, options=None):
        self.options = options or self.Options()
        self.said: list[tuple[int, ...]] = []

    @hookimpl
    def needs(self) -> Needs:
        return Needs(roles=(RoleNeed("opponent", generates=True),), rewards=False)

    @hookimpl
    async def agent_run(self, episode, policy):
        opponent = policy.role(self.options.opponent)
        mine = await policy.generate(episode.task.prompt_ids)
        theirs = await opponent.generate(episode.task.prompt_ids, replace(opponent.sampling, temperature=0.0))
        self.said.append(tuple(theirs.token_ids))
        episode.log("move", mine=list(mine.token_ids), theirs=list(theirs.token_ids))
        rows = policy.trajectories()
        rows[0].agent_rewards = [float(list(mine.token_ids) != list(theirs.token_ids))]
        return rows


def settings(tmp_path, **more):
    return {
        "actor.model": "quickstart",
        "actor.lr": 1e-4,
        "rollout.n": 4,
        "rollout.max_new_tokens": 2,
        "train.batch_size": 4,
        "train.steps": 3,
        "train.threads": 1,
        "trajectories.every": 1,
        "run_dir": str(tmp_path / "run"),
        **more,
    }


def test_an_opponent_stays_as_it_was_while_the_policy_learns(tmp_path):
    game = Game()
    rlhf_host.train(algo="rloo", agent=game, data=[{"prompt": "17+35="}, {"prompt": "38+26="}], **settings(tmp_path))
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["agent/calls"] for row in rows] == [2.0] * 3
    assert max(row["mismatch/max"] for row in rows) < 1e-4
    assert len(set(game.said)) <= 2, "greedy answers of a frozen model to two prompts"
    lines = [
        json.loads(line) for path in sorted((tmp_path / "run/trajectories").iterdir()) for line in path.read_text().splitlines()
    ]
    assert len(lines) == 48, "the opponent's answers are no rows"
    for line in lines:
        calls = [event for event in line["events"] if event["kind"] == "call"]
        assert [call.get("role") for call in calls] == [None, "opponent"]
        assert len({call["id"] for call in calls}) == 2
        assert [event["kind"] for event in line["events"]] == ["call", "call", "move"]
        assert line["reward"] == float(line["events"][2]["mine"] != line["events"][2]["theirs"])
    assert min(row["grad_norm"] for row in rows) > 0


def test_a_role_that_nobody_declared_fails_the_episode_and_says_how_to(tmp_path):
    game = Game(Game.Options(opponent="judge"))
    with pytest.raises(rlhf_host.RunError, match=r"no role 'judge' generates here.*RoleNeed\('judge', generates=True\)"):
        rlhf_host.train(algo="rloo", agent=game, data=[{"prompt": "12+34="}], **settings(tmp_path))


def test_ray_refuses_a_role_that_generates_before_anything_starts(tmp_path):
    pytest.importorskip("ray")
    with pytest.raises(UserError, match="the role opponent generates, and runtime ray has engines for the actor only"):
        rlhf_host.train(algo="rloo", agent=Game(), data=[{"prompt": "12+34="}], **settings(tmp_path, runtime="ray"))


@pytest.mark.parametrize("odd", [{"trainable": True}, {"head": "scalar"}, {"name": "actor"}])
def test_a_role_that_generates_is_a_frozen_language_model(odd):
    with pytest.raises(ValueError, match="generates, so it is no actor, frozen"):
        RoleNeed(**{"name": "opponent", "generates": True, **odd})
