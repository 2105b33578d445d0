"""A session: roles, conversations and completions of a model outside a run, by plain calls."""

from __future__ import annotations

import math

import pytest

import rlhf_host
from rlhf_host import Needs, RoleNeed, Sampling, UserError
from rlhf_host.settings import RoleConfig, RunConfig

SMALL = {"rollout": {"max_new_tokens": 6}, "train": {"threads": 1}}


def test_it_samples_talks_and_asks_roles(tiny_model):
    with rlhf_host.session(model=tiny_model, **SMALL) as running:
        prompts = [running.tokenizer.encode(text) for text in ("1+1=", "2+2=")]
        sampled = running.generate(prompts, Sampling(max_new_tokens=4, temperature=1.0), n=3, seed=5)
        again = running.generate(prompts, Sampling(max_new_tokens=4, temperature=1.0), n=3, seed=5)
        policy = running.policy()
        reply, other = (running.run(one.chat([{"role": "user", "content": "1+1="}])) for one in (policy, running.policy()))
        assert set(running.roles) == {"actor"}
    assert [len(rows) for rows in sampled] == [3, 3]
    assert [[list(row.token_ids) for row in rows] for rows in sampled] == [
        [list(row.token_ids) for row in rows] for rows in again
    ]
    assert all(len(row.token_ids) <= 4 for rows in sampled for row in rows)
    assert all(math.isfinite(value) for rows in sampled for row in rows for value in row.logprobs)
    assert isinstance(reply.content, str)
    assert reply.call_id != other.call_id, "nobody goes on from another's answer"
    assert running.outcome.status == "finished"


def test_needs_choose_the_roles(tiny_model):
    needs = Needs(roles=(RoleNeed("actor", source=None), RoleNeed("reference", source="actor")))
    with rlhf_host.session(model=tiny_model, needs=needs, **SMALL) as running:
        assert set(running.roles) == {"actor", "reference"}


def test_what_fails_inside_ends_it_and_is_raised(tiny_model):
    with pytest.raises(ZeroDivisionError), rlhf_host.session(model=tiny_model, **SMALL) as running:
        1 / 0  # noqa: B018
    assert running.outcome.status == "failed"


def test_a_whole_configuration_is_taken_as_it_is(tiny_model):
    """As commands of other packages have it."""
    config = RunConfig(**SMALL, roles={"actor": RoleConfig(model=str(tiny_model))})
    with rlhf_host.session(config) as running:
        assert running.config is config
    with pytest.raises(UserError, match="leave its other arguments out"), rlhf_host.session(config, model=tiny_model):
        pass


def test_rewards_judge_what_a_collector_collects(tiny_model):
    rows = [{"prompt": "1+1=", "label": "2"}]
    with rlhf_host.session(model=tiny_model, data=rows, rewards=lambda text: len(text) / 10, **SMALL) as running:
        assert running.collector().judges


def test_a_model_that_is_not_there_is_refused():
    with pytest.raises(UserError, match="nowhere"), rlhf_host.session(model="nowhere", **SMALL):
        pass
