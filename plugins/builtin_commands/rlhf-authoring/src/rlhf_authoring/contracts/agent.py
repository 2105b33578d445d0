"""Checks of agents: token in, token out; episodes apart from each other; an end; what is opened is closed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from rlhf_authoring.contracts import session as sessions
from rlhf_authoring.contracts.session import Endless, RecordingEngine, Session, check_running, running
from rlhf_authoring.contracts.subject import Broken, Subject, check, expect
from rlhf_host import Episode, EpisodeFailed, RunError, Trajectory, UserError
from rlhf_host.installed import read_options

TURNS = 200
"""Turns of an agent where no option says how many there may be."""
BLOCKED_S = 0.5
"""So long the event loop may stand still, on a busy machine."""


def _rows(session: Session, engine: RecordingEngine | None = None) -> list[Trajectory]:
    return [trajectory for episode in session.play(engine=engine) for trajectory in episode]


def _played(session: Session, *, together: bool = False) -> list[Any]:
    """Episodes as values that compare."""
    return [
        [(row.segments, row.agent_rewards, row.score, row.finish_reason, row.metrics) for row in episode]
        for episode in session.play(together=together)
    ]


@check_running("agent_step", "agent_run")
def episodes_give_trajectories(session: Session) -> None:
    """Each episode gives trajectories that begin with the prompt and hold what the policy said."""
    for trajectory in _rows(session):
        expect(trajectory.prompt_ids, "a trajectory does not begin with a prompt segment of at least one token")
        expect(trajectory.actions, "a trajectory has no action segment: the policy said nothing that could be trained")


@check_running("agent_step", "agent_run")
def tokens_are_only_appended(session: Session) -> None:
    """Every action stands after exactly the tokens the policy saw, with the tokens, log-probabilities and versions it sampled."""
    engine = session.engine()
    for trajectory in _rows(session, engine):
        seen: list[int] = []
        for segment in trajectory.segments:
            if segment.kind == "action":
                answers = [answer for prompt, answer in engine.answers if prompt == tuple(seen)]
                expect(answers, "an action stands after tokens that the policy never saw; append tokens, do not re-tokenise")
                answers = [answer for answer in answers if answer.token_ids == segment.token_ids]
                expect(answers, "an action segment differs from the tokens that were sampled")
                same = any((one.logprobs, one.versions) == (segment.logprobs, segment.versions) for one in answers)
                expect(same, "an action segment has other log-probabilities or versions than were sampled")
            seen += segment.token_ids


@check_running("agent_run")
def sampled_tokens_are_trained_once(session: Session) -> None:
    """Sampled tokens are actions in one row at most: rows that branch repeat them in their prompts."""
    engine = session.engine()
    actions = [action for row in _rows(session, engine) for action in row.actions]
    acted = Counter((*action.token_ids, *(action.logprobs or ())) for action in actions)
    answered = Counter((*answer.token_ids, *answer.logprobs) for _, answer in engine.answers)
    expect(acted <= answered, "tokens that were sampled once are actions of two rows; repeat them in the prompt instead")


@check_running("agent_step", "agent_run")
def agent_rewards_are_finite(session: Session) -> None:
    """Rewards of steps are finite numbers or ``None``. Scores and metrics that are none fail every check: the host refuses them."""
    for trajectory in _rows(session):
        for reward in trajectory.agent_rewards:
            expect(reward is None or math.isfinite(reward), f"a step's reward is {reward!r}; give a finite number or None")


@check("agent_step", "agent_run")
def episodes_end(subject: Subject) -> None:
    """With a policy that says nothing, babbles or never stops, an episode ends within its turns and in time."""
    end = sessions.tokenizer().eos_token_id
    scripts = {
        "says nothing": lambda ids, key: [end],
        "babbles": lambda ids, key: [*(3 + (7 * len(ids) + 5 * i) % 40 for i in range(4)), end],
        "never stops": lambda ids, key: [5] * (sessions.MAX_NEW_TOKENS + 1),
    }
    for who, script in scripts.items():
        with running(subject) as session:
            for episode in session.episodes(samples=1):
                try:
                    session.play(
                        [episode], session.engine(script, limit=_turns(subject)), max_tokens=TURNS * sessions.MAX_TOKENS
                    )
                except EpisodeFailed:
                    continue  # an end too
                except (Endless, RunError) as error:
                    endless = error if isinstance(error, Endless) else error.__cause__
                    if not isinstance(endless, Endless):
                        raise
                    raise Broken(f"with a policy that {who}, {endless}") from error


def _turns(subject: Subject) -> int:
    """Returns the number of answers that an episode may ask for: the context's end is none of its own. A role that generates may
    answer before each turn of the policy, and after the last one.
    """
    own = getattr(read_options(subject.info, subject.cls, subject.options), "max_turns", None)
    turns = own if isinstance(own, int) and own else TURNS
    return turns + (turns + 1) * sum(need.generates for need in subject.needs.roles)


@check_running("agent_reset", "agent_step", "agent_run")
def the_event_loop_goes_on(session: Session) -> None:
    """An ``async`` hook awaits what it waits for: where it blocks, all other episodes stand still."""
    stops = []
    for _ in range(2):  # a busy machine stops it too, but not each time
        with session.loop.watched() as longest:
            session.play(together=True)
        stops.append(max(longest))
    message = "an async hook blocks the event loop for {:.1f} s: await, or write it as def, which runs in a thread"
    expect(min(stops) < BLOCKED_S, message.format(min(stops)))


@check_running("agent_step", "agent_run")
def episodes_do_not_see_each_other(session: Session) -> None:
    """Episodes played at once, or again on the same instance, go as they go alone: their state lies on ``episode``."""
    alone, together = _played(session), _played(session, together=True)
    expect(together == alone, "episodes played at once go otherwise than one after another; keep state on episode.state")
    expect(_played(session) == alone, "an episode played again on the same instance goes otherwise")


@check("agent_step", "agent_run")
def episodes_are_deterministic(subject: Subject) -> None:
    """The same seed and the same answers make the same episode on a fresh instance: draw from ``episode.seed`` and ``sample``."""
    with running(subject) as first, running(subject) as second:
        same = _played(first) == _played(second)
    expect(same, "the same seed and answers make another episode; draw from episode.seed, sample and turn")


class _EngineDown(Exception):
    pass


def _play_until_down(session: Session, answers: int) -> RecordingEngine:
    """One episode with an engine that fails after so many answers."""
    engine = session.engine(limit=answers, error=_EngineDown("the engine is down"))
    session.play(session.episodes(samples=1)[:1], engine)
    return engine


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, what it was raised from, and so on. What an ``except`` was busy with is no cause."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


@check_running("agent_close")
def close_follows_every_failure(session: Session) -> None:
    """``agent_close`` copes with an episode that failed at any point, one that never began included, and with being last."""
    before = _played(session)
    for answers in (0, 1):
        try:
            _play_until_down(session, answers)
        except (_EngineDown, EpisodeFailed):
            pass
        except (RunError, UserError) as error:
            causes = list(_causes(error))
            cause = causes[min(1, len(causes) - 1)]
            fine = any(isinstance(each, _EngineDown | EpisodeFailed) for each in causes)
            expect(fine, f"after a failure of the engine agent_close raises {type(cause).__name__}: {cause}")
    try:
        session.call("agent_close", episode=Episode("never-began", "never", session.episodes()[0].task))
    except (RunError, UserError) as error:
        raise Broken(f"agent_close raises for an episode whose reset failed (state None): {error}") from error
    expect(_played(session) == before, "after failed episodes the next ones go otherwise")


@check_running("agent_run")
def failures_of_the_engine_come_out(session: Session) -> None:
    """``agent_run`` raises when the policy cannot answer: half an episode is not a short one."""
    for answers in (0, 1):
        try:
            engine = _play_until_down(session, answers)
        except (_EngineDown, EpisodeFailed, RunError, UserError):
            continue
        message = "the engine's failure is swallowed and a trajectory returned; let it out or raise EpisodeFailed"
        expect(not engine.raised, message)
