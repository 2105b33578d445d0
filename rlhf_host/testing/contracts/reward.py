"""Checks of ``score``: one valid result per trajectory, whatever was said, in time, each group on its own."""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

from rlhf_host.errors import RunError, UserError
from rlhf_host.records.episodes import Reward, Segment, Task, Trajectory, Unjudged
from rlhf_host.testing.contracts.session import Session, said
from rlhf_host.testing.contracts.subject import Broken, Subject, expect
from rlhf_host.testing.contracts.suite import check

ODD_TEXTS = ("", " \n\t ", "\0", "\u202e٧٢\u200f", "👩‍👩‍👧" * 40, "((((" * 200, "-" * 300, "1e999", "9" * 5000, "a " * 20_000)
ODD_LABELS: tuple[Any, ...] = (None, "", 7, 1.5, [], {"answer": "4"}, "\0")


def _valid(answer: Any, trajectories: Sequence[Trajectory]) -> list[Reward | float | Unjudged | None]:
    """The answer as a list of what ``score`` may give. Raises ``Broken``."""
    sequence = hasattr(answer, "__len__") and hasattr(answer, "__getitem__")
    expect(sequence, f"score gave a {type(answer).__name__}; return a list, one entry per trajectory")
    expect(len(answer) == len(trajectories), f"score gave {len(answer)} results for {len(trajectories)} trajectories")
    return list(answer)


def _value(reward: Reward | float | Unjudged | None) -> float | None:
    if reward is None or isinstance(reward, Unjudged):
        return None
    return reward.total if isinstance(reward, Reward) else float(reward)


def _plain(answer: Any, trajectories: Sequence[Trajectory]) -> list[Any]:
    """Results as values that compare."""
    return [
        (one.total, one.score, list(one.turns or ()), list(one.tokens or ()), dict(one.metrics))
        if isinstance(one, Reward)
        else one
        for one in _valid(answer, trajectories)
    ]


@check("score")
def score_gives_one_result_each(subject: Subject) -> None:
    """A list as long as the group, of one and of many trajectories; synchronous or not."""
    with Session(subject) as session:
        for group in session.groups():
            for part in (group, group[:1]):
                _valid(session.score(part), part)


@check("score")
def results_are_rewards(subject: Subject) -> None:
    """Each result is a ``Reward``, a number, or ``Unjudged`` or ``None`` where it cannot judge; metrics are numbers."""
    with Session(subject) as session:
        for group in session.groups():
            for one in _valid(session.score(group), group):
                known = one is None or isinstance(one, Reward | Real | Unjudged)
                expect(known, f"score gave a {type(one).__name__}; give a Reward, a number, Unjudged or None")
                for name, value in one.metrics.items() if isinstance(one, Reward) else ():
                    expect(isinstance(value, Real), f"metric {name!r} is a {type(value).__name__}, not a number")


@check("score")
def rewards_are_finite(subject: Subject) -> None:
    """Values are finite numbers; scores lie in [0, 1]; what cannot be judged is ``None``, not NaN."""
    with Session(subject) as session:
        for group in session.groups():
            for one in _valid(session.score(group), group):
                value = _value(one)
                expect(value is None or math.isfinite(value), f"a reward is {value}; give None for what cannot be judged")
                if isinstance(one, Reward) and one.score is not None:
                    expect(0.0 <= one.score <= 1.0, f"a score is {one.score}; scores lie in [0, 1]")


@check("score")
def placed_rewards_fit(subject: Subject) -> None:
    """Rewards per turn are as many as the action segments, rewards per token as many as the action tokens."""
    with Session(subject) as session:
        group = [_two_turns(trajectory) for trajectory in session.judged()]
        for one, trajectory in zip(_valid(session.score(group), group), group, strict=True):
            if isinstance(one, Reward):
                turns, tokens = len(trajectory.actions), trajectory.action_length
                fits = one.turns is None or len(one.turns) == turns
                expect(fits, f"{len(one.turns or ())} rewards per turn for {turns} turns")
                fits = one.tokens is None or len(one.tokens) == tokens
                expect(fits, f"{len(one.tokens or ())} rewards per token for {tokens} action tokens")


def _two_turns(trajectory: Trajectory) -> Trajectory:
    thought = [ord(character) for character in "let me see"]
    first = [Segment("action", thought, [-0.5] * len(thought), [0] * len(thought)), Segment("observation", [ord("?")])]
    prompt, answer = trajectory.segments
    trajectory.segments = [prompt, *first, answer]
    return trajectory


@check("score")
def any_text_is_judged(subject: Subject) -> None:
    """Arbitrary text, found by hypothesis, gets a finite reward or ``None``, never an exception."""
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st

    words = st.sampled_from([*(subject.texts or ("4", "answer", "\\boxed{")), "\n", " ", "{", "}", "####", "$", "\\"])
    text = st.one_of(st.text(max_size=60), st.lists(st.one_of(words, st.text(max_size=4)), max_size=8).map("".join))
    with Session(subject) as session:
        task = session.judged()[0].task

        @settings(
            max_examples=40,
            deadline=None,
            derandomize=True,
            database=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        )
        @given(text)
        def judge(said_text: str) -> None:
            _judges(session, [said_text], task)

        judge()
        for odd in ODD_TEXTS:
            _judges(session, [odd], task)


def _judges(session: Session, texts: Sequence[str], task: Task) -> None:
    group = [said(text, task, sample) for sample, text in enumerate(texts)]
    shown = ", ".join(repr(text[:60]) for text in texts)
    try:
        answer = session.score(group)
    except (RunError, UserError) as error:
        raise Broken(f"the text {shown} raises: {error}; a text is worth something or nothing, or None") from error
    for one in _valid(answer, group):
        value = _value(one)
        expect(value is None or math.isfinite(value), f"the text {shown} has the reward {value}")


@check("score")
def odd_trajectories_leave_their_neighbours(subject: Subject) -> None:
    """Empty, huge and unreadable answers change nothing for the others of their group."""
    with Session(subject) as session:
        group = session.judged()
        alone = _plain(session.score(group), group)
        odd = [said(text, group[0].task, 100 + number) for number, text in enumerate(ODD_TEXTS)]
        empty = said("", group[0].task, 200)
        empty.segments = empty.segments[:1]
        mixed = [odd[0], *group, *odd[1:], empty]
        try:
            among = _plain(session.score(mixed), mixed)[1 : 1 + len(group)]
        except (RunError, UserError) as error:
            raise Broken(
                f"an odd answer keeps its whole group from being judged: {error}; give it None or its worth"
            ) from error
        expect(among == alone, "an odd answer changes what its neighbours get")


@check("score")
def odd_labels_are_survived(subject: Subject) -> None:
    """A ground truth of another type gives rewards, ``None`` or an exception, and the next group is judged as before."""
    with Session(subject) as session:
        group = session.judged()
        before = _plain(session.score(group), group)
        for label in ODD_LABELS:
            task = Task(group[0].task.prompt, label, index=77, source="made_up")
            odd = [said(trajectory.text, task, trajectory.sample) for trajectory in group]
            try:
                answer = session.score(odd)
            except (RunError, UserError) as error:
                ends = isinstance(error.__cause__, SystemExit)
                expect(not ends, f"the ground truth {label!r} ends the process; raise an Exception or give None")
                continue
            for one in _valid(answer, odd):
                value = _value(one)
                expect(value is None or math.isfinite(value), f"the ground truth {label!r} makes the reward {value}")
        after = _plain(session.score(group), group)
        expect(after == before, "after a group with an odd ground truth, the same answers get other rewards")


@check("score")
def score_keeps_its_deadline(subject: Subject) -> None:
    """Long and hostile texts are judged in time: nothing waits for ever, in a thread or on the event loop."""
    long = ["a" * 20_000, "(" * 3000, "{" * 3000, "1+" * 4000, "x " * 8000, "\\frac{1}{" * 200, "9^{9^{9^9}}", "a" * 30 + "!"]
    with Session(subject) as session:
        for task in {id(group[0].task): group[0].task for group in session.groups()}.values():
            group = [said(text, task, sample) for sample, text in enumerate(long)]
            try:
                session.score(group)
            except (RunError, UserError):
                continue  # that texts do not raise is another check's; here: that the answer comes


@check("score")
def order_of_trajectories_does_not_matter(subject: Subject) -> None:
    """A group in another order has the same rewards in that order."""
    with Session(subject) as session:
        for group in session.groups():
            straight = _plain(session.score(group), group)
            turned = _plain(session.score(group[::-1]), group[::-1])
            expect(turned == straight[::-1], "the same answers in another order get other rewards")


@check("score")
def groups_at_once_are_as_one_after_another(subject: Subject) -> None:
    """Many groups scored at once get what each gets alone."""
    with Session(subject) as session:
        groups = session.groups() * 3
        alone = [_plain(session.score(group), group) for group in groups]

        async def at_once() -> list[Any]:
            return list(await asyncio.gather(*(session.scoring(group) for group in groups)))

        together = session.wait(at_once(), "score")
        found = [_plain(answer, group) for answer, group in zip(together, groups, strict=True)]
        expect(found == alone, "groups scored at once get other rewards than one after another")


@check("score")
def trajectories_are_left_alone(subject: Subject) -> None:
    """``score`` changes nothing of the trajectories: other plugins judge them at the same time, and they are trained on."""
    with Session(subject) as session:
        group = session.judged()
        before = [copy.deepcopy(trajectory) for trajectory in group]
        session.score(group)
        expect(group == before, "score changes the trajectories; return what you find, in Reward(metrics=...)")
