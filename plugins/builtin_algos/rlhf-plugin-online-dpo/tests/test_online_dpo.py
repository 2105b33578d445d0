"""Online DPO against hand-worked pairs and values."""

import importlib.metadata
import math

import pytest
import torch
from rlhf_plugin_online_dpo import OnlineDPO

from rlhf_host import Drop, Group, LossTerm, Outputs, Segment, Task, Trajectory, UserError
from rlhf_host.rollouts.experience import make_experience


def group(*rewards, name="a", episodes=None):
    """Answers of one token, their samples numbered from 0."""

    def row(sample, reward):
        episode = f"{name}-{sample if episodes is None else episodes[sample]}"
        segments = [Segment("prompt", [1]), Segment("action", [10 + sample], [-1.0], [0])]
        return Trajectory(episode, name, Task(""), segments, sample=sample, reward=reward)

    return Group(name, Task(""), [row(sample, reward) for sample, reward in enumerate(rewards)])


@pytest.fixture
def plugin():
    return OnlineDPO(OnlineDPO.Options(beta=0.5))


def test_the_best_and_the_worst_are_a_pair_and_of_equal_ones_the_earlier_samples(plugin):
    rows = plugin.make_rows([group(0.5, 2.0, -1.0, 2.0, -1.0), group(1.0, 3.0, name="b")])
    assert [(row.group_id, row.sample, row.columns["label"]) for row in rows] == [
        ("a", 1, 1.0),
        ("a", 2, 0.0),
        ("b", 1, 1.0),
        ("b", 0, 0.0),
    ]
    # A pair is one episode, so that each of its rows counts one half.
    assert [(row.episode_id, row.row) for row in rows] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]


@pytest.mark.parametrize("rewards", [(1.0, 1.0), (0.1 + 0.2, 0.3), (1e6, 1e6 + 0.5), (2.0,)])
def test_a_group_of_equal_rewards_is_dropped_and_gives_no_pair(plugin, rewards):
    assert plugin.keep_group(group(*rewards)) == Drop("equal_rewards")
    assert plugin.make_rows([group(*rewards), group(0.0, 1.0, name="b")])[0].group_id == "b"


def test_the_loss_is_that_of_the_pair(plugin):
    groups = [group(2.0, 0.0)]
    groups[0].trajectories = plugin.make_rows(groups)
    batch = make_experience(groups, {}, step=1, max_new_tokens=1, temperature=1.0)
    batch.logprobs["reference"] = torch.tensor([[-2.0], [-3.0]])
    items = plugin.compute_loss(Outputs(logprobs=torch.tensor([[-1.0], [-3.5]])), batch)
    (term,) = [item for item in items if isinstance(item, LossTerm)]
    assert term.values.tolist() == pytest.approx([math.log1p(math.exp(-0.75))] * 2)


def test_episodes_of_several_trajectories_are_refused(plugin):
    with pytest.raises(UserError, match="a pair is two answers of one trajectory each"):
        plugin.make_rows([group(1.0, 2.0, 3.0, episodes=[0, 0, 1])])


def test_options_are_those_of_the_preference_losses():
    with pytest.raises(ValueError, match="loss hinge has no label_smoothing"):
        OnlineDPO.Options(loss="hinge", label_smoothing=0.1)


def test_needs_and_entry_point(plugin):
    needs = plugin.needs()
    assert (needs.data, needs.rewards, needs.min_group_size, needs.unit_rows) == ("prompts", True, 2, True)
    assert [(role.name, role.trainable, role.lr) for role in needs.roles] == [("actor", True, 1e-6), ("reference", False, None)]
    assert [role.name for role in OnlineDPO(OnlineDPO.Options(reference_free=True)).needs().roles] == ["actor"]
    (entry,) = [e for e in importlib.metadata.entry_points(group="rlhf.algos") if e.name == "online_dpo"]
    assert entry.load() is OnlineDPO
