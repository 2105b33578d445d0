"""Checks of ``score``: one valid result per trajectory, whatever was said, in time, each group on its own."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

from rlhf_authoring.contracts.session import Session, answer_of, check_running
from rlhf_authoring.contracts.subject import Broken, expect
from rlhf_host import Reward, RunError, Segment, Task, Trajectory, Unjudged, UserError
from rlhf_host.internals import Failed

ODD_TEXTS = ("", " \n\t ", "\0", "\u202e٧٢\u200f", "👩‍👩‍👧" * 40, "((((" * 200, "-" * 300, "1e999", "9" * 5000, "a " * 20_000)
ODD_LABELS: tuple[Any, ...] = (None, "", 7, 1.5, [], {"answer": "4"}, "\0")
LONG_TEXTS = (
    "a" * 20_000, "(" * 3000, "{" * 3000, "1+" * 4000, "x " * 8000, "\\frac{1}{" * 200, "9^{9^{9^9}}", "a" * 30 + "!",
)  # fmt: skip

Result = Reward | float | Unjudged | None


def _results(answer: Any, trajectories: Sequence[Trajectory]) -> list[Result]:
    """The answer as a list of what ``score`` may give. Raises ``Broken``, and ``RunError`` for what a function raised."""
    sequence = hasattr(answer, "__len__") and hasattr(answer, "__getitem__")
    expect(sequence, f"score gave a {type(answer).__name__}; return a list, one entry per trajectory")
    expect(len(answer) == len(trajectories), f"score gave {len(answer)} results for {len(trajectories)} trajectories")
    if failed := next((one for one in answer if isinstance(one, Failed)), None):
        raise RunError(failed.reason)
    return list(answer)


def _score(session: Session, *groups: Sequence[Trajectory], restored: bool = True) -> list[Result]:
    """The results of all groups, scored at once, one after another."""
    answers = zip(session.score(*groups, restored=restored), groups, strict=True)
    return [result for answer, group in answers for result in _results(answer, group)]


def _shown(results: Sequence[Result]) -> list[str]:
    """Results as values that compare, whatever sequences and numbers they hold."""
    return [repr((one.total, one)) if isinstance(one, Reward) else repr(one) for one in results]


def _expect_finite(results: Sequence[Result], whose: str) -> None:
    for one in results:
        value = one.total if isinstance(one, Reward) else one
        finite = value is None or isinstance(value, Unjudged) or math.isfinite(value)
        expect(finite, f"{whose} has the reward {value}; give None for what cannot be judged")


@check_running("score")
def score_gives_one_result_each(session: Session) -> None:
    """A list as long as the group, of one and of many trajectories; synchronous or not."""
    for group in session.groups():
        for part in (group, group[:1]):
            _score(session, part)


@check_running("score")
def results_are_rewards(session: Session) -> None:
    """Each result is a ``Reward``, a number, or ``Unjudged`` or ``None`` where it cannot judge; metrics are numbers."""
    for one in _score(session, *session.groups()):
        known = one is None or isinstance(one, Reward | Real | Unjudged)
        expect(known, f"score gave a {type(one).__name__}; give a Reward, a number, Unjudged or None")
        for name, value in one.metrics.items() if isinstance(one, Reward) else ():
            expect(isinstance(value, Real), f"metric {name!r} is a {type(value).__name__}, not a number")


@check_running("score")
def rewards_are_finite(session: Session) -> None:
    """Values are finite numbers; scores lie in [0, 1]; what cannot be judged is ``None``, not NaN."""
    results = _score(session, *session.groups())
    _expect_finite(results, "a trajectory")
    for score in (one.score for one in results if isinstance(one, Reward) and one.score is not None):
        expect(0.0 <= score <= 1.0, f"a score is {score}; scores lie in [0, 1]")


@check_running("score")
def placed_rewards_fit(session: Session) -> None:
    """Rewards per turn are as many as the action segments, rewards per token as many as the action tokens."""
    group = session.groups()[0]
    for trajectory in group:
        thought = [ord(character) for character in "let me see"]
        first = Segment("action", thought, [-0.5] * len(thought), [0] * len(thought))
        trajectory.segments[1:1] = [first, Segment("observation", [ord("?")])]
    for one, trajectory in zip(_score(session, group), group, strict=True):
        if isinstance(one, Reward):
            turns, tokens = len(trajectory.actions), trajectory.action_length
            expect(one.turns is None or len(one.turns) == turns, f"{len(one.turns or ())} rewards per turn for {turns} turns")
            fits = one.tokens is None or len(one.tokens) == tokens
            expect(fits, f"{len(one.tokens or ())} rewards per token for {tokens} action tokens")


@check_running("score")
def any_text_is_judged(session: Session) -> None:
    """Arbitrary text, found by hypothesis, gets a finite reward or ``None``, never an exception."""
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st

    words = st.sampled_from([*(session.subject.texts or ("4", "answer", "\\boxed{")), "\n", " ", "{", "}", "####", "$", "\\"])
    texts = st.one_of(st.text(max_size=60), st.lists(st.one_of(words, st.text(max_size=4)), max_size=8).map("".join))
    task = session.groups()[0][0].task

    def judge(text: str) -> None:
        try:
            results = _score(session, [answer_of(text, task)])
        except (RunError, UserError) as error:
            message = f"the text {text[:60]!r} raises: {error}; a text is worth something or nothing, or None"
            raise Broken(message) from error
        _expect_finite(results, f"the text {text[:60]!r}")

    checks = list(HealthCheck)
    quick = settings(max_examples=40, deadline=None, derandomize=True, report_multiple_bugs=False, suppress_health_check=checks)
    quick(given(texts)(judge))()
    for odd in ODD_TEXTS:
        judge(odd)


@check_running("score")
def odd_trajectories_leave_their_neighbours(session: Session) -> None:
    """Empty, huge and unreadable answers change nothing for the others of their group, unless the reward needs groups."""
    group = session.groups()[0]
    alone = _shown(_score(session, group))
    odd = [answer_of(text, group[0].task, 100 + number) for number, text in enumerate(ODD_TEXTS)]
    empty = answer_of("", group[0].task, 200)
    empty.segments = empty.segments[:1]
    try:
        among = _shown(_score(session, [odd[0], *group, *odd[1:], empty]))[1 : 1 + len(group)]
    except (RunError, UserError) as error:
        message = f"an odd answer keeps its whole group from being judged: {error}; give it None or its worth"
        raise Broken(message) from error
    if session.subject.needs.min_group_size > 1:
        return None  # it compares: with other answers in its group, the same answer is worth something else
    expect(among == alone, "an odd answer changes what its neighbours get")


@check_running("score")
def odd_labels_are_survived(session: Session) -> None:
    """A ground truth of another type gives rewards, ``None`` or an exception, and the next group is judged as before."""
    group = session.groups()[0]
    before = _shown(_score(session, group))
    for label in ODD_LABELS:
        task = Task(group[0].task.prompt, label, index=77, source="made_up")
        try:
            results = _score(session, [answer_of(trajectory.text, task, trajectory.sample) for trajectory in group])
        except (RunError, UserError) as error:
            ends = isinstance(error.__cause__, SystemExit)
            expect(not ends, f"the ground truth {label!r} ends the process; raise an Exception or give None")
        else:
            _expect_finite(results, f"the ground truth {label!r}")
    after = _shown(_score(session, group))
    expect(after == before, "after a group with an odd ground truth, the same answers get other rewards")


@check_running("score")
def missing_labels_are_not_judged(session: Session) -> None:
    """An answer to a task without a ground truth is not judged if the reward depends on one: ``None``, not a 0."""

    def judged(group: Sequence[Trajectory], label: Any) -> list[Result]:
        task = Task(group[0].task.prompt, label, index=78, source="made_up")
        try:
            return _score(session, [answer_of(trajectory.text, task, trajectory.sample) for trajectory in group])
        except (RunError, UserError):
            return []

    groups = session.groups()
    labels = [group[0].task.ground_truth for group in groups]
    for group in groups:
        if len({str(_shown(judged(group, label))) for label in labels}) > 1:
            known = [one for one in judged(group, None) if one is not None and not isinstance(one, Unjudged)]
            expect(not known, f"without a ground truth an answer gets {known[:1]}; give None, or the policy learns from it")


@check_running("score")
def score_keeps_its_deadline(session: Session) -> None:
    """Long and hostile texts are judged in time: nothing waits for ever, in a thread or on the event loop."""
    for task in (group[0].task for group in session.groups()):
        try:
            session.score([answer_of(text, task, sample) for sample, text in enumerate(LONG_TEXTS)])
        except (RunError, UserError):
            continue  # that texts do not raise is another check's; here: that the answer comes


@check_running("score")
def order_of_trajectories_does_not_matter(session: Session) -> None:
    """A group in another order has the same rewards in that order."""
    for group in session.groups():
        straight, turned = _shown(_score(session, group)), _shown(_score(session, group[::-1]))
        expect(turned == straight[::-1], "the same answers in another order get other rewards")


@check_running("score")
def groups_at_once_are_as_one_after_another(session: Session) -> None:
    """Many groups scored at once get what each gets alone; where each moves a state that matters, any reward."""
    groups = session.groups() * 3
    for trajectory in (trajectory for group in groups for trajectory in group):
        trajectory.decode = _giving_way(trajectory.text)
    alone = [result for group in groups for result in _shown(_score(session, group))]
    in_turn = [result for number, group in enumerate(groups) for result in _shown(_score(session, group, restored=not number))]
    if in_turn != alone and session.state is not None:
        return _expect_finite(_score(session, *groups), "a trajectory of groups that are scored at once")
    expect(_shown(_score(session, *groups)) == alone, "groups scored at once get other rewards than one after another")


def _giving_way(text: str) -> Callable[[Sequence[int]], str]:
    """A decoder that lets other threads go on in the middle of a call, as a real one may."""

    def decode(token_ids: Sequence[int]) -> str:
        time.sleep(0.001)
        return text

    return decode


@check_running("score")
def trajectories_are_left_alone(session: Session) -> None:
    """``score`` changes nothing of the trajectories: other plugins judge them at the same time, and they are trained on."""
    group = session.groups()[0]
    before = copy.deepcopy(group)
    session.score(group)
    expect(group == before, "score changes the trajectories; return what you find, in Reward(metrics=...)")
