"""Groups as tensors, by hand: where tokens, rewards and masks lie."""

from __future__ import annotations

import pytest
import torch

from rlhf_host import AlgoNeeds, Group, Reward, RunError, Segment, Task, Trajectory, hookimpl
from rlhf_host.rollouts.experience import apply_masks, apply_rewards, make_experience

from .playing import load


def row(name, *segments, group="g", reward=1.0, **rewards):
    """A trajectory of a prompt and segments: a list of tokens is an action, a tuple an observation."""
    made = [Segment("prompt", [1, 2])]
    for tokens in segments:
        logprobs = [-0.5] * len(tokens)
        acts = isinstance(tokens, list)
        made.append(Segment("action", tokens, logprobs, [3] * len(tokens)) if acts else Segment("observation", list(tokens)))
    trajectory = Trajectory(name, group, Task(""), made, "stop")
    trajectory.reward, trajectory.rewards = reward, rewards
    return trajectory


def experience(*rows, weights):
    groups = [
        Group(name, Task(""), [each for each in rows if each.group_id == name]) for name in {each.group_id: 0 for each in rows}
    ]
    return make_experience(groups, weights, step=1, max_new_tokens=8, temperature=1.0, version=3)


def test_actions_are_trained_and_observations_are_not():
    made = experience(row("a", [5, 6], (7, 8, 9), [4]), row("b", [5]), weights={})
    assert made.completion_ids.tolist() == [[5, 6, 7, 8, 9, 4], [5, 0, 0, 0, 0, 0]]
    assert made.action_mask.int().tolist() == [[1, 1, 0, 0, 0, 1], [1, 0, 0, 0, 0, 0]]
    assert torch.equal(made.loss_mask, made.action_mask)
    assert made.completion_mask.sum(-1).tolist() == [6, 1]
    assert made.turn_ids.tolist() == [[0, 0, -1, -1, -1, 1], [0, -1, -1, -1, -1, -1]]
    assert made.sampler_logprobs.tolist() == [[-0.5, -0.5, 0, 0, 0, -0.5], [-0.5, 0, 0, 0, 0, 0]]
    assert made.versions[made.action_mask].unique().tolist() == [3]


def test_rewards_lie_where_they_were_given_times_the_weight_of_their_plugin():
    turns, tokens = Reward(turns=[0.25, 0.5]), Reward(tokens=[1.0, 2.0, 3.0])
    one = row("a", [5, 6], (7,), [4], whole=Reward(10.0), turns=turns, tokens=tokens)
    found = experience(one, weights={"whole": 0.5, "turns": 2.0, "tokens": 3.0}).token_rewards
    assert found.tolist() == [[3.0, 6.0 + 2.0 * 0.25, 0.0, 9.0 + 2.0 * 0.5 + 0.5 * 10.0]]
    assert experience(one, weights={"whole": 0.0, "turns": 0.0, "tokens": 0.0}).token_rewards.abs().sum() == 0


class Transforms:
    """Rewards times 2 and plus something."""

    def __init__(self, plus):
        self.plus = plus

    @hookimpl
    def transform_rewards(self, experience, rewards):
        return 2 * rewards + self.plus


class Masks:
    def __init__(self, *columns):
        self.columns = columns

    @hookimpl
    def loss_masks(self, experience):
        mask = torch.ones_like(experience.action_mask)
        mask[:, list(self.columns)] = False
        return mask

    @hookimpl
    def shape_rewards(self, experience):
        return torch.full(experience.action_mask.shape, 0.5)


def test_transforms_go_in_the_order_in_which_they_were_chosen_and_their_change_lies_on_the_last_action():
    made = experience(row("a", [5, 6], (7,), reward=3.0, whole=Reward(3.0)), weights={"whole": 1.0})
    apply_rewards(made, load(Transforms(1.0), Transforms(10.0)))
    assert made.rewards.tolist() == [2 * (2 * 3.0 + 1) + 10]
    assert made.token_rewards.tolist() == [[0.0, 24.0, 0.0]], "3 from the plugin, 21 from what they changed"


def test_what_shapes_is_added_up_on_actions_alone_and_masks_are_joined_by_and():
    made = experience(row("a", [5, 6, 8], (7,)), weights={})
    apply_rewards(made, load(Masks(0), Masks(1)))
    assert made.shaped.tolist() == [[1.0, 1.0, 1.0, 0.0]]
    assert made.loss_mask.int().tolist() == [[0, 0, 1, 0]]


def test_rows_of_one_episode_and_of_one_group_are_known_as_such():
    rows = [row("a", [5]), row("a", [6]), row("b", [7]), row("c", [8], group="h")]
    made = experience(*rows, weights={})
    assert (made.episode_id.tolist(), made.group_id.tolist()) == ([0, 0, 1, 2], [0, 0, 0, 1])


def test_rewards_that_are_not_finite_end_the_run():
    made = experience(row("a", [5], reward=3.0), weights={})
    with pytest.raises(RunError, match="extension:p0 gave non-finite numbers from transform_rewards"):
        apply_rewards(made, load(Transforms(float("inf"))))


@pytest.mark.parametrize("together", [False, True])
def test_rows_that_train_together_leave_the_loss_together(together):
    class Pairs:
        @hookimpl
        def needs(self):
            return AlgoNeeds(unit_rows=together)

        @hookimpl
        def loss_masks(self, experience):
            mask = torch.ones_like(experience.action_mask)
            mask[0] = False  # the whole row
            mask[2, 0] = False  # a token of it
            return mask

    made = experience(*(row(name, [5, 6]) for name in "abcd"), weights={})
    made.unit_id = torch.tensor([0, 0, 1, 1])
    apply_masks(made, load(Pairs()))
    other = [False, False] if together else [True, True]
    assert made.loss_mask.tolist() == [[False, False], other, [False, True], [True, True]]
