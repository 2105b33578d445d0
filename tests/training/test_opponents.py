"""Frozen models that agents talk to: ``policy.role``."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.resources import files

import pytest
import torch
from pydantic import BaseModel
from transformers import AutoModelForCausalLM

import rlhf_host
from rlhf_host import Needs, RoleNeed, UserError, hookimpl
from rlhf_host.runtimes.local import Local


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
    def run_started(self, context):
        self.ends = set(context.processes())

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
    assert game.ends == {"trainer", "engine local", "role opponent"}
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


def test_a_runtime_without_such_engines_refuses_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(Local, "traits", replace(Local.traits, generates=False))
    with pytest.raises(UserError, match="the role opponent generates, and runtime local has engines for the actor only"):
        rlhf_host.train(algo="rloo", agent=Game(), data=[{"prompt": "12+34="}], **settings(tmp_path))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("odd", [{"trainable": True}, {"head": "scalar"}, {"name": "actor"}])
def test_a_role_that_generates_is_a_frozen_language_model(odd):
    with pytest.raises(ValueError, match="generates, so it is no actor, frozen"):
        RoleNeed(**{"name": "opponent", "generates": True, **odd})


# --- mixtures with the policy -------------------------------------------------------------------------


class Mixed:
    """Asks the mixture of the policy and its start; longer answers of the policy win."""

    def __init__(self, share):
        self.share, self.said, self.versions = share, [], set()

    @hookimpl
    def needs(self):
        return Needs(roles=(RoleNeed("start", generates=True, mixes=self.share),), rewards=False)

    @hookimpl
    async def agent_run(self, episode, policy):
        await policy.generate(episode.task.prompt_ids)
        prompt = list(episode.task.prompt_ids)
        answer = await policy.role("start").generate(prompt)
        self.said.append((prompt, list(answer.token_ids), list(answer.logprobs)))
        self.versions |= {*answer.versions}
        rows = policy.trajectories()
        rows[0].agent_rewards = [float(sum(rows[0].segments[1].token_ids))]
        return rows


def test_a_mixture_is_sampled_with_the_policys_present_weights(tmp_path):
    """Its log-probabilities are those of both models, computed by transformers from the mixed logits of whole rows."""
    agent, share = Mixed(0.25), 0.25
    data = [{"prompt": "17+35="}, {"prompt": "38+2="}, {"prompt": "4+4="}, {"prompt": "41+29="}]
    common = settings(tmp_path, **{"actor.lr": 3e-3, "train.steps": 1, "rollout.max_new_tokens": 4})
    rlhf_host.train(algo="rloo", agent=agent, data=data, **common)
    run = tmp_path / "run"
    start = AutoModelForCausalLM.from_pretrained(files("rlhf_host") / "models/quickstart")
    policy = AutoModelForCausalLM.from_pretrained(run / "model")
    agent.said.clear()
    rlhf_host.train(resume=str(run), agent=agent, data=data, steps=2)
    assert len(agent.said) == 16
    assert agent.versions == {0, 1}, "it says which weights of the policy it has"
    moved = 0.0
    for prompt, answer, told in agent.said:
        with torch.no_grad():
            own, other = (model(torch.tensor([prompt + answer])).logits[0] for model in (start, policy))
        mixed, alone = ((share * own + (1 - share) * other).log_softmax(-1), own.log_softmax(-1))
        picked = torch.tensor(answer).unsqueeze(-1)
        expected, at_start = (each[len(prompt) - 1 : -1].gather(-1, picked).squeeze(-1) for each in (mixed, alone))
        assert told == pytest.approx(expected.tolist(), abs=1e-4)
        moved = max(moved, float((expected - at_start).abs().max()))
    assert moved > 0.01, "the policy did not move, so nothing was mixed"


@pytest.mark.parametrize(
    "odd", [{"mixes": 0.0}, {"mixes": 1.0}, {"generates": False}, {"source": "elsewhere"}, {"source": None}]
)
def test_a_mixture_generates_with_a_share_between_0_and_1_and_comes_from_the_actor(odd):
    with pytest.raises(ValueError, match="the role 'start' mixes, so it generates, comes from the actor"):
        RoleNeed(**{"name": "start", "generates": True, "mixes": 0.5, **odd})


def test_engines_with_weights_of_their_own_refuse_a_mixture(tmp_path):
    pytest.importorskip("vllm")
    with pytest.raises(UserError, match="the role start samples from its mixture with the actor, which engine vllm cannot"):
        rlhf_host.train(algo="rloo", agent=Mixed(0.5), data=[{"prompt": "12+34="}], **settings(tmp_path, engine="vllm"))
