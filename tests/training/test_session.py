"""A session: roles, conversations and completions of a model outside a run, by plain calls."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

import rlhf_host
from rlhf_host import Needs, RoleNeed, Sampling, Segment, Task, Trajectory, UserError
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


def test_it_samples_its_data_and_answers_tasks_scored_or_not(tiny_model):
    rows = [{"prompt": f"{number}+1=", "label": str(number + 1)} for number in range(3)]
    settings = {"model": tiny_model, "data": rows, "n": 2, "data.shuffle": False, **SMALL}
    with rlhf_host.session(rewards=lambda text: len(text) / 10, **settings) as running:
        first, second = running.sample(1, 2).groups, running.sample(2, 2).groups
        answered = running.answer(1, [first[1].task])
    assert [group.task.prompt for group in (*first, *second)] == ["0+1=", "1+1=", "2+1=", "0+1="]
    assert [group.group_id for group in second] == ["train-2-0", "train-2-1"]
    assert all(row.reward == len(row.text) / 10 for group in first for row in group.trajectories)
    (again,) = answered.groups
    assert [row.text for row in again.trajectories] == [row.text for row in first[1].trajectories]
    with rlhf_host.session(**settings) as running:
        bare = running.sample(1, 2)
    assert bare.groups == []
    assert [row.reward for row in bare.unjudged_rows] == [None] * 4
    assert {row.text for row in bare.unjudged_rows} == {row.text for group in first for row in group.trajectories}


def test_without_roles_nothing_is_loaded():
    with rlhf_host.session(model="nowhere", needs=Needs(), **SMALL) as running:
        assert (running.roles, running.tokenizer, running.started) == ({}, None, None)


def test_a_model_that_is_not_there_is_refused():
    with pytest.raises(UserError, match="nowhere"), rlhf_host.session(model="nowhere", **SMALL):
        pass


@pytest.mark.parametrize("debug", [False, True])
def test_a_role_gives_its_likeliest_tokens_at_any_temperature(tiny_model, debug):
    prompt, rows = [5, 6, 7], [[8, 9, 10, 11], [12], []]
    with rlhf_host.session(model=tiny_model, debug=debug, **SMALL) as running:
        actor = running.roles["actor"]
        read = [
            Trajectory(f"t{number}", f"t{number}", Task(""), [Segment("prompt", prompt), Segment("action", ids)])
            for number, ids in enumerate(rows)
        ]
        plain, cold = (running.run(actor.logprobs(read, **more)) for more in ({}, {"temperature": 0.5}))
        likely, colder = (running.run(actor.topk(read, 3, **more)) for more in ({}, {"temperature": 0.5}))
        for greedy in (actor.logprobs(read, temperature=0), actor.topk(read, 3, temperature=0)):
            with pytest.raises(ValueError, match="actor has no log-probabilities at temperature 0"):
                running.run(greedy)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    for temperature, logprobs, tops in ((1.0, plain, likely), (0.5, cold, colder)):
        for ids, own, top in zip(rows, logprobs, tops, strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1] / temperature
            every = logits.log_softmax(-1)
            assert own == pytest.approx([float(row[token]) for row, token in zip(every, ids, strict=True)], abs=1e-5)
            assert [list(one) for one in top] == [row.topk(3).indices.tolist() for row in every]
            for one, row in zip(top, every, strict=True):
                assert list(one.values()) == pytest.approx(row.topk(3).values.tolist(), abs=1e-5)
