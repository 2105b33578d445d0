"""Records that plugins make say at once what is wrong with them; batches and experiences keep apart what each place has."""

import pickle

import pytest
import torch
from rlhf_authoring import make_batch

from rlhf_host import (
    GROUP_MEAN_TOKEN_MEAN,
    LOSS,
    SEQUENCE_MEAN_TOKEN_SUM,
    TOKEN_MEAN,
    AgentNeeds,
    Aggregation,
    AlgoNeeds,
    Batch,
    CorrectionNeeds,
    Experience,
    Extra,
    Forbid,
    LossTerm,
    Needs,
    Output,
    Reward,
    RoleNeed,
    Task,
)
from rlhf_host.records.tensors import TopK


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"value": 1.0, "turns": [5.0, 5.0]}, "value 1, turns 10"),
        ({"value": 1.0, "tokens": [0.5, 0.4]}, "value 1, tokens 0.9"),
        ({"value": 1.0, "parts": {"a": 1.0, "b": 1e-3}}, "value 1, parts 1.001"),
        ({"turns": [1.0], "parts": {"a": 2.0}}, "turns 1, parts 2"),
    ],
)
def test_a_reward_that_disagrees_with_itself_is_an_error(given, shown):
    with pytest.raises(ValueError, match=f"a reward disagrees with itself: {shown}"):
        Reward(**given)


def test_a_reward_s_total_is_the_value_or_the_sum_of_what_was_given():
    assert Reward(0.5, turns=[0.25, 0.25]).total == 0.5
    assert Reward(tokens=[1.0, 2.0]).total == 3.0
    assert Reward(parts={"right": 1.0, "style": 0.5}).total == 1.5
    assert Reward(0.3, tokens=[0.1] * 3, parts={"a": 0.1, "b": 0.2}).total == 0.3, "rounding is no disagreement"
    assert Reward(1e9, turns=[1e9 + 100.0]).total == 1e9
    assert Reward().total == 0.0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"outputs": ("actor.logprobs",)}, r"outputs is a tuple of Output\(\.\.\.\), and has 'actor\.logprobs'"),
        ({"outputs": frozenset({"entropy"})}, r"outputs is a tuple of Output\(\.\.\.\), and has 'entropy'"),
        ({"outputs": "entropy"}, r"outputs is a tuple of Output"),
        ({"forbids": ("old_logprobs=sampler",)}, r"forbids is a tuple of Forbid\(\.\.\.\)"),
        ({"roles": ("actor",)}, r"roles is a tuple of RoleNeed\(\.\.\.\), and has 'actor'"),
    ],
)
def test_a_text_where_a_type_belongs_names_the_type(given, message):
    with pytest.raises(TypeError, match=message):
        Needs(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mask": "loss_mask"}, r"the mask of 'policy' is a Mask: LOSS, ACTION, COMPLETION or Extra\(name\), not 'loss_mask'"),
        ({"mask": None}, "is a Mask"),
        (
            {"aggregation": "token-mean"},
            r"is an Aggregation, such as TOKEN_MEAN, not 'token-mean': Aggregation\.parse reads texts",
        ),
        ({"aggregation": None}, "is an Aggregation"),
    ],
)
def test_a_loss_term_s_mask_and_aggregation_are_types(given, message):
    with pytest.raises(TypeError, match=message):
        LossTerm("policy", torch.zeros(2), **given)
    LossTerm("policy", torch.zeros(2), LOSS, 1.0, TOKEN_MEAN)
    LossTerm("policy", torch.zeros(2), Extra("mine"))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (("perplexity", "teacher"), "there is no output 'perplexity' of a role"),
        (("bootstrap",), "there is no output 'bootstrap' of the pass itself"),
        (("distribution",), "there is no output 'distribution' of the pass itself"),
        (("logprob", "teacher"), "logprobs, values, bootstrap, distribution"),
        (("logprobs", "teacher", 8), "top is a number of tokens, of a distribution"),
        (("distribution", "teacher", 0), "top is a number of tokens"),
    ],
)
def test_outputs_that_there_are_not_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Output(*wrong)


def test_needs_are_hashable_values_that_merge():
    one = Needs(roles=(RoleNeed("actor"),), outputs=(Output("entropy"),), forbids=(Forbid("rollout.n", 1, "why"),))
    assert one == Needs(roles=(RoleNeed("actor"),), outputs=(Output("entropy"),), forbids=(Forbid("rollout.n", 1, "why"),))
    assert hash(Output("distribution", role="teacher", top=4)) == hash(Output("distribution", "teacher", 4))


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (AlgoNeeds, "weights", "tokn"),
        (CorrectionNeeds, "weights", None),
        (Needs, "min_group_size", -3),
        (AgentNeeds, "min_group_size", "4"),
    ],
)
def test_needs_that_there_are_not_are_refused(kind, field, value):
    with pytest.raises(ValueError, match=f"Needs: {field} is .*, not {value!r}"):
        kind(**{field: value})


def test_needs_of_a_kind_are_those_given_or_its_defaults():
    own = AgentNeeds(rewards=False, server=True)
    assert AgentNeeds.of(own) is own
    assert AlgoNeeds.of(own) == AlgoNeeds.of(None) == AlgoNeeds()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("token-mean", TOKEN_MEAN),
        ("group-mean-token-mean", GROUP_MEAN_TOKEN_MEAN),
        ("sequence-mean-token-sum", SEQUENCE_MEAN_TOKEN_SUM),
        ("sequence-mean-token-sum-over(256)", Aggregation("sequence-mean-token-sum", 256)),
        ("sequence-mean-token-sum-over(2.5)", Aggregation("sequence-mean-token-sum", 2.5)),
    ],
)
def test_aggregations_are_texts_on_the_command_line_alone(text, expected):
    assert Aggregation.parse(text) == expected
    assert str(expected) == text


@pytest.mark.parametrize(
    "wrong", [("mean",), ("token-mean", 3), ("sequence-mean-token-sum", 0), ("sequence-mean-token-sum", -1)]
)
def test_aggregations_that_there_are_not_are_refused(wrong):
    with pytest.raises(ValueError, match="aggregation is one of token-mean"):
        Aggregation(*wrong)


def test_a_worker_s_batch_has_neither_rewards_nor_records_and_says_where_they_are():
    experience = make_batch([3, 5])
    assert experience.rewards.shape == (2,)
    batch = experience.batch()
    assert type(batch) is Batch
    for name in ("rewards", "plugin_rewards", "scores", "token_rewards", "shaped", "trajectories", "parent"):
        with pytest.raises(AttributeError, match=rf"batch\.{name} stays with the controller: give it in prepare_batch"):
            getattr(batch, name)
    with pytest.raises(AttributeError, match=r"bootstrap_value is bootstrap\[role\] now"):
        batch.bootstrap_value  # noqa: B018
    with pytest.raises(AttributeError, match=r"batch\.nothing does not exist"):
        batch.nothing  # noqa: B018
    again = pickle.loads(pickle.dumps(batch))
    assert torch.equal(again.completion_ids, batch.completion_ids)


def test_a_task_says_what_a_name_that_people_guess_is_called():
    task = Task("1+1=", "2")
    with pytest.raises(AttributeError, match=r"task\.label does not exist: it is task\.ground_truth"):
        task.label  # noqa: B018
    with pytest.raises(AttributeError, match=r"task\.nothing does not exist$"):
        task.nothing  # noqa: B018
    assert pickle.loads(pickle.dumps(task)) == task


def test_rows_are_selected_with_all_that_belongs_to_them():
    experience = make_batch([3, 5, 2], groups=[0, 0, 1])
    experience.bootstrap["critic"] = torch.arange(3.0)
    experience.distributions["teacher"] = TopK(torch.arange(30.0).view(3, 5, 2), torch.arange(30).view(3, 5, 2))
    experience.extra["mine"] = {"row": torch.tensor([7.0, 8.0, 9.0]), "coef": 0.1}
    experience.parent = torch.tensor([-1, 0, 1])
    part = experience.select([2, 0])
    assert isinstance(part, Experience)
    assert part.completion_ids.shape == (2, 3)
    assert part.bootstrap["critic"].tolist() == [2.0, 0.0]
    assert part.distributions["teacher"].ids.tolist() == experience.distributions["teacher"].ids[[2, 0], :3].tolist()
    assert part.extra["mine"]["row"].tolist() == [9.0, 7.0]
    assert part.extra["mine"]["coef"] == 0.1
    assert part.parent.tolist() == [-1, -1], "row 1 is not among them"
    assert experience.select([1, 0]).parent.tolist() == [1, -1]
