"""Episodes, scoring and filling a batch, with a scripted engine: what is counted, what leaves, and in which order."""

import asyncio
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch

from rlhf_host import (
    Drop,
    Reward,
    RunError,
    Task,
    Trajectory,
    Unjudged,
    hookimpl,
)
from rlhf_host.config.schema import RolloutConfig
from rlhf_host.records.episodes import Segment
from rlhf_host.records.metric_names import MetricNames
from rlhf_host.rollouts.collect import Played
from rlhf_host.rollouts.episodes import episode_seed
from rlhf_host.rollouts.experience import apply_rewards, make_experience, reward_metrics
from rlhf_host.training.untrained_groups import read_untrained, write_untrained

from .playing import Guess, Length, load


def test_groups_come_in_draw_order_with_distinct_keys_per_sample(collect):
    found, engine = collect(load(Length()), groups=4, n=3)
    assert [group.task.index for group in found.groups] == [0, 1, 2, 3]
    assert [t.sample for t in found.groups[0].trajectories] == [0, 1, 2]
    keys = [key for _, _, key in engine.calls]
    assert len(set(keys)) == 12
    assert keys[0] == (episode_seed(7, "train", found.groups[0].task, 0), 0, 0)
    assert engine.expected[:12] == [*range(1, 13)], "all are waited for before one asks"
    assert engine.expected[-1] == 0


def test_another_epoch_split_or_seed_draws_other_uniforms():
    task = Task("12", index=3, source="made")
    seeds = {episode_seed(seed, split, task, epoch) for seed in (0, 1) for split in ("train", "eval") for epoch in (0, 1)}
    assert len(seeds) == 8
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_rewards_add_up_by_weight_and_scores_average(collect):
    class Half:
        @hookimpl
        def score(self, trajectories):
            return [0.5 for _ in trajectories]

    found, _ = collect(load(Length(), Half(), weights={0: 2.0, 1: -1.0}), groups=1)
    (first, second) = found.groups[0].trajectories
    assert [first.reward, second.reward] == [2.0 * first.action_length - 0.5, 2.0 * second.action_length - 0.5]
    assert first.rewards["p1"].total == 0.5
    assert first.score == float(first.action_length > 2)


@pytest.mark.parametrize(
    ("score", "reason"),
    [
        (lambda ts: [None] * len(ts), "could not judge"),
        (lambda ts: [float("nan")] * len(ts), "a reward that is not finite"),
        (lambda ts: [1e39] * len(ts), "a reward that is not finite"),
        (lambda ts: [Reward(parts={"style": 1e39})] * len(ts), "a reward that is not finite"),
        (lambda ts: [Reward(parts={"a\nb": 1.0})] * len(ts), "parts of a reward have the name 'a"),
        (
            lambda ts: [Reward(parts={f"{n}": 1.0 for n in range(101)})] * len(ts),
            "parts of a reward have 101 metrics; at most 100",
        ),
        (lambda ts: [Reward(1.0, metrics={3: 1.0})] * len(ts), "the name of a metric is a text, not 3"),
        (lambda ts: [Unjudged("the judge gave no JSON")] * len(ts), "p1: the judge gave no JSON"),
        (lambda ts: [Reward(1.0, turns=[5.0])] * len(ts), "value 1, turns 5"),
        (lambda ts: 1 / 0, "ZeroDivisionError"),
        (lambda ts: [1.0], "1 rewards for 2 trajectories"),
        (lambda ts: ["high"] * len(ts), "not str"),
        (lambda ts: [Reward(1.0, score=2.0)] * len(ts), "a score lies in"),
        (lambda ts: [Reward(tokens=[1.0] * 99)] * len(ts), "99 placed rewards"),
    ],
)
def test_a_reward_that_fails_is_unjudged_never_zero_and_too_many_stop_the_run(collect, score, reason):
    class Failing:
        @hookimpl
        def score(self, trajectories):
            return score(trajectories)

    with pytest.raises(RunError, match=rf"6 of 6 trajectories could not be judged.*{reason}"):
        collect(load(Length(), Failing()))
    found, _ = collect(load(Length(), Failing(), weights={1: 0.0}))
    assert found.unjudged.total() == 0, "at weight 0 it only logs"
    assert found.groups[0].trajectories[0].rewards["p1"] is None


def test_numbers_of_every_kind_become_floats(collect, tmp_path):
    """Others cannot be read back from a checkpoint."""

    class Odd(Length):
        @hookimpl
        def score(self, trajectories):
            half, one = Fraction(1, 2), np.float32(1.0)
            return [Reward(parts={"a": half, "b": half}, turns=[one], score=True, metrics={"right": True})] * len(trajectories)

    class Right:
        @hookimpl
        def score(self, trajectories):
            return [Reward(value=True, tokens=[Fraction(1, t.action_length)] * t.action_length) for t in trajectories]

    found, _ = collect(load(Odd(), Right()), groups=1, n=1)
    [row] = found.groups[0].trajectories
    odd, right = row.rewards.values()
    numbers = [*odd.parts.values(), *odd.turns, odd.score, *odd.metrics.values(), right.value, *right.tokens]
    assert {type(number) for number in numbers} == {float}
    write_untrained({0: Played(found.groups[0], [], Counter(finished=1))}, tmp_path)
    [again] = read_untrained(tmp_path)[0].group.trajectories
    assert again.rewards == row.rewards


def test_unjudged_trajectories_leave_before_group_statistics_and_are_counted(collect):
    class Picky:
        @hookimpl
        def score(self, trajectories):
            return [None if t.sample == 1 else 1.0 for t in trajectories]

    found, _ = collect(load(Picky()), groups=2, n=3, settings=RolloutConfig(max_unjudged=0.4))
    assert [len(group.trajectories) for group in found.groups] == [2, 2]
    assert found.metrics(MetricNames("filters"))["rollout/unjudged"] == 2.0
    assert [t.sample for t in found.unjudged_rows] == [1, 1]
    with pytest.raises(RunError, match=r"limit rollout\.max_unjudged 0\.2"):
        collect(load(Picky()), groups=2, n=3, settings=RolloutConfig(max_unjudged=0.2))


def test_a_slow_reward_meets_its_deadline_and_a_flaky_one_its_retries(collect):
    class Slow:
        @hookimpl
        async def score(self, trajectories):
            await asyncio.sleep(60)

    with pytest.raises(RunError, match=r"no answer in 0\.05 s"):
        collect(load(Slow()), groups=1, settings=RolloutConfig(score_timeout_s=0.05))

    class Flaky:
        tries = 0

        @hookimpl
        def score(self, trajectories):
            self.tries += 1
            if self.tries == 1:
                raise ConnectionError
            return [1.0] * len(trajectories)

    found, _ = collect(load(Flaky()), groups=1, settings=RolloutConfig(score_retries=1))
    assert found.groups[0].trajectories[0].reward == 1.0


def test_dropped_groups_are_refilled_in_order_counted_and_bounded(collect):
    class EvenOnly:
        @hookimpl
        def keep_group(self, group):
            return True if group.task.index % 2 == 0 else Drop("odd")

    found, _ = collect(load(Length(), EvenOnly()), groups=3)
    assert [group.task.index for group in found.groups] == [0, 2, 4]
    assert (found.drawn, found.dropped["odd"]) == (5, 2)
    assert found.metrics(MetricNames("filters"))["rollout/dropped/odd"] == 2.0

    class Nothing:
        @hookimpl
        def keep_group(self, group):
            return Drop("too easy")

    class Vague:
        @hookimpl
        def keep_group(self, group):
            return 1

    with pytest.raises(RunError, match="extension:p1 gave an int from keep_group, expected bool or Drop or None"):
        collect(load(Length(), Vague()))
    with pytest.raises(RunError, match=r"no group was kept of 9 drawn: too easy \(9\)"):
        collect(load(Length(), Nothing()), settings=RolloutConfig(max_refills=2))


def test_turns_append_tokens_and_rewards_land_where_they_were_earned(collect, tokenizer):
    agent = Guess()
    found, engine = collect(load(agent=agent), groups=1, n=2, script=lambda ids, key: [10, 11])
    trajectory = found.groups[0].trajectories[0]
    assert [s.kind for s in trajectory.segments] == ["prompt", "action", "observation", "action", "observation", "action"]
    assert trajectory.reward == 1.5
    assert trajectory.score == 1.0
    asked = [ids for ids, _, key in engine.calls if key[1] == 0]
    whole = [token for segment in trajectory.segments for token in segment.token_ids]
    for ids in asked:
        assert list(ids) == whole[: len(ids)], "every prompt extends the last, token by token"
    assert sorted(agent.closed) == sorted(agent.opened)

    experience = make_experience(found.groups, {}, step=1, max_new_tokens=8, temperature=1.0)
    row = experience.token_rewards[0]
    where = [int((experience.turn_ids[0] == turn).nonzero()[-1]) for turn in range(3)]
    assert row[where].tolist() == [0.25, 0.25, 1.0]
    assert float(row.sum()) == 1.5
    assert (experience.reward_names, experience.reward_weights) == (("agent",), (1.0,))
    assert experience.action_mask[0].sum() == 6
    assert experience.sampler_logprobs[~experience.action_mask].eq(0).all()


def test_failed_episodes_are_retried_or_counted_and_always_closed(collect):
    agent = Guess(fails=1)
    found, _ = collect(load(agent=agent), groups=1, n=2)
    assert len(found.groups[0].trajectories) == 2
    agent = Guess(fails=1, retryable=False)
    found, _ = collect(load(agent=agent), groups=2, n=2)
    assert found.failed == {"sandbox lost": 1}
    assert sum(len(group.trajectories) for group in found.groups) == 3
    assert sorted(agent.closed) == sorted(agent.opened)


def test_a_trajectory_ends_where_the_context_does(collect):
    found, _ = collect(load(agent=Guess()), groups=1, n=1, max_tokens=10, script=lambda ids, key: [9] * 5)
    (trajectory,) = found.groups[0].trajectories
    assert trajectory.truncated
    assert sum(len(s.token_ids) for s in trajectory.segments if s.kind != "observation") <= 10


def test_a_token_without_a_text_is_named_once(collect, tokenizer, caplog):
    size = len(tokenizer)
    found, _ = collect(load(Length()), groups=2, script=lambda ids, key: [size + 3, 5, size - 1])
    assert len({t.text for group in found.groups for t in group.trajectories}) == 1
    (told,) = (record.getMessage() for record in caplog.records if "was sampled" in record.getMessage())
    assert told.startswith(f"token {size + 3} was sampled, and the tokenizer has only {size}: rewards read nothing there;")
    caplog.clear()
    collect(load(Length()), groups=2, script=lambda ids, key: [5, size - 1])
    assert "was sampled" not in caplog.text


def test_an_agent_that_runs_its_own_loop(collect):
    class Own:
        @hookimpl
        async def agent_run(self, episode, policy):
            from rlhf_host import Segment

            first = await policy.generate([5, 6])
            second = await policy.generate([5, 6, *first.token_ids, 7])
            action = [Segment("action", g.token_ids, g.logprobs, g.versions) for g in (first, second)]
            segments = [Segment("prompt", [5, 6]), action[0], Segment("observation", [7]), action[1]]
            return [Trajectory(episode.episode_id, episode.group_id, episode.task, segments, agent_rewards=[None, 2.0])]

    found, engine = collect(load(agent=Own()), groups=1, n=2, script=lambda ids, key: [8])
    assert [t.reward for t in found.groups[0].trajectories] == [2.0, 2.0]
    assert len({key for _, _, key in engine.calls}) == 4


def rows_of_an_episode(*branches):
    """``(parent, branch)`` of each row after a first of prompt ``3, 4`` and one sampled token ``9``."""

    class Brancher:
        @hookimpl
        async def agent_run(self, episode, policy):
            rows = []
            for number, (parent, branch) in enumerate([(None, 0), *branches]):
                prompt = [3, 4, 9][: 2 + (number > 0)]
                action = Segment("action", [9], [-0.5], [0])
                ids = (episode.episode_id, episode.group_id, episode.task)
                rows.append(Trajectory(*ids, [Segment("prompt", prompt), action], parent=parent, branch=branch))
            return rows

    return Brancher()


def test_rows_that_branch_name_their_parent(collect):
    found, _ = collect(load(Length(), agent=rows_of_an_episode((0, 3), (0, 2), (1, 3))), groups=2, n=1)
    experience = make_experience(found.groups, {"p0": 1.0}, step=1, max_new_tokens=8, temperature=1.0)
    assert experience.parent.tolist() == [-1, 0, 0, 1, -1, 4, 4, 5]
    assert experience.branch.tolist() == [0, 3, 2, 3] * 2
    del found.groups[0].trajectories[1]
    experience = make_experience(found.groups, {"p0": 1.0}, step=1, max_new_tokens=8, temperature=1.0)
    assert experience.parent.tolist() == [-1, 0, -1, -1, 3, 3, 4], "a row whose parent left has none"


@pytest.mark.parametrize(
    ("branch", "message"),
    [
        ((1, 3), "row 1 with the parent 1; that is the index of an earlier row"),
        ((-1, 3), "row 1 with the parent -1"),
        ((5, 3), "row 1 with the parent 5"),
        ((0, 4), "row 1, which does not begin with the first 4 tokens of row 0"),
        ((0, 0), "row 1, which does not begin with the first 0 tokens of row 0"),
    ],
)
def test_a_row_that_did_not_branch_there_is_refused(collect, branch, message):
    with pytest.raises(RunError, match=message):
        collect(load(Length(), agent=rows_of_an_episode(branch)), groups=1, n=1)


def test_the_parts_of_a_reward_are_columns_of_their_own(collect):
    class Parts:
        @hookimpl
        def score(self, trajectories):
            rewards = [Reward(parts={"a": 1.0, "b": float(t.sample)}) for t in trajectories]
            return [Reward(5.0), *rewards[1:]]

    found, _ = collect(load(Length(), Parts(), weights={1: 0.5}), groups=1, n=3)
    experience = make_experience(found.groups, {"p0": 1.0, "p1": 0.5}, step=1, max_new_tokens=8, temperature=1.0)
    assert experience.reward_names == ("p0", "p1.a", "p1.b", "p1")
    assert experience.reward_weights == (1.0, 0.5, 0.5, 0.5)
    assert experience.plugin_rewards[:, 1:].nan_to_num(-7).tolist() == [[-7, -7, 5], [1, 1, -7], [1, 2, -7]]
    weighed = experience.plugin_rewards.nan_to_num() @ torch.tensor(experience.reward_weights)
    torch.testing.assert_close(weighed, experience.rewards)


@pytest.mark.parametrize(
    ("reward", "total"),
    [
        (lambda trajectory: 1e38, r"1e\+39"),
        (lambda trajectory: Reward(tokens=[0.0] * (trajectory.action_length - 1) + [1e38]), "inf"),
        (lambda trajectory: Reward(tokens=[1e38, -1e38, *[0.0] * (trajectory.action_length - 2)]), "inf"),
    ],
)
def test_a_sum_that_float32_cannot_hold_is_unjudged(collect, reward, total):
    class Large:
        @hookimpl
        def score(self, trajectories):
            return [reward(trajectory) for trajectory in trajectories]

    with pytest.raises(RunError, match=rf"the weighted sum of its rewards, {total}, is not finite in float32"):
        collect(load(Large(), weights={0: 10.0}), groups=1, script=lambda ids, key: [4, 5])


def test_what_float32_cannot_hold_is_not_finite_from_a_transform_either(collect):
    class Stretch:
        @hookimpl
        def transform_rewards(self, rewards):
            return rewards.double() * 1e39

    manager = load(Length(), Stretch())
    found, _ = collect(load(Length()), groups=1)
    experience = make_experience(found.groups, {"p0": 1.0}, step=1, max_new_tokens=8, temperature=1.0)
    with pytest.raises(RunError, match="gave non-finite numbers from transform_rewards"):
        apply_rewards(experience, manager)


def test_a_transform_comes_before_any_baseline_and_lands_on_the_last_action_token(collect):
    class Clip:
        @hookimpl
        def transform_rewards(self, experience, rewards):
            return rewards.clamp(max=2.0)

    class Minus:
        @hookimpl
        def transform_rewards(self, experience, rewards):
            return rewards - 1.0

    class Shape:
        @hookimpl
        def shape_rewards(self, experience):
            return torch.full(experience.action_mask.shape, 0.5)

    class NotFirst:
        @hookimpl
        def loss_masks(self, experience):
            mask = torch.ones_like(experience.action_mask)
            mask[:, 0] = False
            return mask

    manager = load(Length(), Clip(), Minus(), Shape(), Shape(), NotFirst())
    found, _ = collect(manager, groups=2)
    experience = make_experience(found.groups, {"p0": 1.0}, step=1, max_new_tokens=8, temperature=1.0)
    raw = experience.rewards.clone()
    apply_rewards(experience, manager)
    assert experience.rewards.tolist() == (raw.clamp(max=2.0) - 1.0).tolist()
    assert experience.token_rewards.sum(-1).tolist() == pytest.approx(experience.rewards.tolist())
    assert experience.shaped[experience.action_mask].eq(1.0).all()
    assert experience.shaped[~experience.action_mask].eq(0.0).all()
    assert not experience.loss_mask[:, 0].any()
    assert experience.loss_mask[:, 1:].eq(experience.action_mask[:, 1:]).all()
    assert reward_metrics(experience)["reward/p0"] == pytest.approx(float(raw.mean()))


def test_no_rewards_at_all_are_unjudged(collect):
    with pytest.raises(RunError, match="neither a reward plugin nor the agent gave a reward"):
        collect(load())
