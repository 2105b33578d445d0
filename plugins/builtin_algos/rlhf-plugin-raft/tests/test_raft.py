"""RAFT against hand-worked choices and values."""

import importlib.metadata

import pytest
import torch
from rlhf_authoring.tensors import make_batch
from rlhf_plugin_raft import RAFT

from rlhf_host import Drop, Group, LossTerm, Outputs, Segment, Task, Trajectory


def group(*rewards, name="a", episodes=None):
    """Answers of one token, their samples numbered from 0."""

    def row(sample, reward):
        episode = f"{name}-{sample if episodes is None else episodes[sample]}"
        segments = [Segment("prompt", [1]), Segment("action", [10 + sample], [-1.0], [0])]
        return Trajectory(episode, name, Task(""), segments, sample=sample, reward=reward)

    return Group(name, Task(""), [row(sample, reward) for sample, reward in enumerate(rewards)])


def chosen(*groups, **options):
    return [(row.group_id, row.sample) for row in RAFT(RAFT.Options(**options)).make_rows(groups)]


def test_the_best_answer_of_each_prompt_is_trained_on():
    assert chosen(group(0.5, 2.0, -1.0), group(-3.0, -4.0, name="b")) == [("a", 1), ("b", 0)]


def test_several_may_be_kept_and_of_equal_ones_the_earlier_samples():
    assert chosen(group(1.0, 0.0, 1.0, 1.0), keep=2) == [("a", 0), ("a", 2)]


def test_all_rows_of_the_best_episode_are_kept():
    assert chosen(group(1.0, 3.0, 3.0, 2.0, episodes=[0, 1, 1, 2])) == [("a", 1), ("a", 2)]


def test_answers_below_the_limit_are_left_out_and_a_group_of_them_is_dropped():
    plugin = RAFT(RAFT.Options(keep=2, min_reward=1.0))
    good, bad = group(1.0, 0.5, 3.0), group(0.9, 0.2)
    assert [row.sample for row in plugin.make_rows([good, bad])] == [2, 0]
    assert plugin.keep_group(good) is True
    assert plugin.keep_group(bad) == Drop("below_min_reward")
    assert RAFT(RAFT.Options()).keep_group(bad) is True


def test_the_loss_is_the_negative_log_likelihood():
    batch = make_batch([2, 1])
    outputs = Outputs(logprobs=torch.tensor([[-1.0, -2.0], [-0.5, float("nan")]]))
    (term,) = [item for item in RAFT(RAFT.Options()).compute_loss(outputs, batch) if isinstance(item, LossTerm)]
    assert term.values.tolist() == [[1.0, 2.0], [0.5, 0.0]]
    assert str(term.aggregation) == "token-mean"


@pytest.mark.parametrize("options", [{"keep": 0}, {"keep": 1.5}, {"min_reward": "high"}, {"n": 4}])
def test_bad_options_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        RAFT.Options(**options)


def test_needs_and_entry_point():
    needs = RAFT(RAFT.Options(keep=3)).needs()
    assert (needs.data, needs.rewards, needs.min_group_size, needs.weights) == ("prompts", True, 4, None)
    assert [(role.name, role.trainable, role.lr) for role in needs.roles] == [("actor", True, 2e-5)]
    assert RAFT(RAFT.Options(keep=3, min_reward=0.0)).needs().min_group_size == 3
    (entry,) = [e for e in importlib.metadata.entry_points(group="rlhf.algos") if e.name == "raft"]
    assert entry.load() is RAFT
