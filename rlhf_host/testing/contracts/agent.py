"""Checks of agents: token in, token out; episodes apart from each other; an end; what is opened is closed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from numbers import Real
from typing import Any

from rlhf_host.errors import RunError, UserError
from rlhf_host.plugins.selection import read_options
from rlhf_host.records.episodes import Episode, EpisodeFailed, Generation, SampleKey, Sampling, Trajectory
from rlhf_host.testing.contracts.session import MAX_NEW_TOKENS, MAX_TOKENS, Endless, RecordingEngine, Session, tokenizer
from rlhf_host.testing.contracts.subject import Broken, Subject, expect
from rlhf_host.testing.contracts.suite import check

OWN_LOOP_TURNS = 64
"""Turns of an agent with a loop of its own, where no option says how many there may be."""


def _played(trajectories: Sequence[Sequence[Trajectory]]) -> list[Any]:
    """Episodes as values that compare."""
    return [
        [
            (
                [(segment.kind, list(segment.token_ids)) for segment in trajectory.segments],
                list(trajectory.agent_rewards),
                trajectory.score,
                trajectory.finish_reason,
                dict(trajectory.metrics),
            )
            for trajectory in episode
        ]
        for episode in trajectories
    ]


@check("agent_step", "agent_run")
def episodes_give_trajectories(subject: Subject) -> None:
    """Each episode gives trajectories that begin with the prompt and hold what the policy said."""
    with Session(subject) as session:
        for episode in session.play():
            for trajectory in episode:
                expect(trajectory.prompt_ids, "a trajectory does not begin with a prompt segment of at least one token")
                expect(trajectory.actions, "a trajectory has no action segment: the policy said nothing that could be trained")


@check("agent_step", "agent_run")
def tokens_are_only_appended(subject: Subject) -> None:
    """Every action stands after exactly the tokens the policy saw, with the tokens, log-probabilities and versions it sampled."""
    with Session(subject) as session:
        engine = session.engine()
        played = session.play(engine=engine)
        made: dict[tuple[int, ...], list[Generation]] = {}
        for asked, generation in engine.answers:
            made.setdefault(asked, []).append(generation)
        for trajectory in (trajectory for episode in played for trajectory in episode):
            seen: list[int] = []
            for segment in trajectory.segments:
                if segment.kind == "action":
                    answers = made.get(tuple(seen), [])
                    expect(
                        answers, "an action stands after tokens that the policy never saw; append tokens, do not re-tokenise"
                    )
                    same = [answer for answer in answers if answer.token_ids == segment.token_ids]
                    expect(same, "an action segment differs from the tokens that were sampled")
                    kept = any((a.logprobs, a.versions) == (segment.logprobs, segment.versions) for a in same)
                    expect(kept, "an action segment has other log-probabilities or versions than were sampled")
                seen += segment.token_ids


@check("agent_run")
def sampled_tokens_are_trained_once(subject: Subject) -> None:
    """What was sampled is an action in one row at most: rows that branch repeat it in their prompts."""
    with Session(subject) as session:
        engine = session.engine()
        rows = [trajectory for episode in session.play(engine=engine) for trajectory in episode]
        acted = Counter((*action.token_ids, *(action.logprobs or ())) for row in rows for action in row.actions)
        answered = Counter((*answer.token_ids, *answer.logprobs) for _, answer in engine.answers)
        expect(acted <= answered, "tokens that were sampled once are actions of two rows; repeat them in the prompt instead")


@check("agent_step", "agent_run")
def agent_rewards_are_valid(subject: Subject) -> None:
    """Rewards of steps are finite numbers or ``None``, scores lie in [0, 1], metrics are numbers."""
    with Session(subject) as session:
        for trajectory in (trajectory for episode in session.play() for trajectory in episode):
            for reward in trajectory.agent_rewards:
                fine = reward is None or (isinstance(reward, Real) and math.isfinite(reward))
                expect(fine, f"a step's reward is {reward!r}; give a finite number or None")
            score = trajectory.score
            expect(score is None or 0.0 <= score <= 1.0, f"a score is {score}; scores lie in [0, 1]")
            for name, value in trajectory.metrics.items():
                expect(isinstance(value, Real), f"metric {name!r} is a {type(value).__name__}, not a number")


@check("agent_step", "agent_run")
def episodes_end(subject: Subject) -> None:
    """With a policy that says nothing, babbles or never stops, an episode ends within its turns and in time."""
    limit = _turns(subject)
    for who, script in (("says nothing", _nothing), ("babbles", _babble), ("never stops", _endless)):
        with Session(subject) as session:
            for episode in session.episodes(samples=1):
                try:
                    session.play([episode], session.engine(script, limit=limit))
                except Endless as error:
                    raise Broken(f"with a policy that {who}, {error}") from error
                except EpisodeFailed:
                    continue  # an end too
                except RunError as error:
                    if isinstance(error.__cause__, Endless):
                        raise Broken(f"with a policy that {who}, {error.__cause__}") from error
                    raise


def _turns(subject: Subject) -> int:
    """How many turns an episode may have; those of step agents end with the host's room for tokens."""
    own = getattr(read_options(subject.info, subject.cls, subject.options), "max_turns", None)
    bound = subject.max_turns or (own if isinstance(own, int) else None)
    return bound or (OWN_LOOP_TURNS if "agent_run" in subject.hooks else MAX_TOKENS)


def _nothing(token_ids: Sequence[int], key: SampleKey) -> list[int]:
    return [tokenizer().eos_token_id]


def _babble(token_ids: Sequence[int], key: SampleKey) -> list[int]:
    return [*(3 + (7 * len(token_ids) + 5 * i) % 40 for i in range(4)), tokenizer().eos_token_id]


def _endless(token_ids: Sequence[int], key: SampleKey) -> list[int]:
    return [5] * (MAX_NEW_TOKENS + 1)


@check("agent_step", "agent_run")
def episodes_do_not_see_each_other(subject: Subject) -> None:
    """Episodes played at once, or again on the same instance, go as they go alone: their state lies on ``episode``."""
    with Session(subject) as session:
        alone = _played(session.play())
        together = _played(session.play(together=True))
        expect(together == alone, "episodes played at once go otherwise than one after another; keep state on episode.state")
        expect(_played(session.play()) == alone, "an episode played again on the same instance goes otherwise")


@check("agent_step", "agent_run")
def episodes_are_deterministic(subject: Subject) -> None:
    """The same seed and the same answers make the same episode on a fresh instance: draw from ``episode.seed`` and ``sample``."""
    found = []
    for _ in range(2):
        with Session(subject) as session:
            found.append(_played(session.play()))
    expect(found[0] == found[1], "the same seed and answers make another episode; draw from episode.seed, sample and turn")


class _EngineDown(Exception):
    pass


class _Failing(RecordingEngine):
    """Answers ``limit`` times, then fails."""

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, key: SampleKey) -> Any:
        if len(self.calls) >= self.limit:
            raise _EngineDown("the engine is down")
        return await RecordingEngine.generate(self, token_ids, sampling, key)


def _ended_by(subject: Subject, session: Session, after: int) -> BaseException | None:
    engine = _Failing(session.engine().script, limit=after)
    try:
        session.play(session.episodes(samples=1)[:1], engine)
    except (_EngineDown, EpisodeFailed) as error:
        return error
    except (RunError, UserError) as error:
        return error.__cause__ or error
    return None


@check("agent_close")
def close_follows_every_failure(subject: Subject) -> None:
    """``agent_close`` copes with an episode that failed at any point, one that never began included, and with being last."""
    with Session(subject) as session:
        before = _played(session.play())
        for after in (0, 1):
            error = _ended_by(subject, session, after)
            fine = error is None or isinstance(error, _EngineDown | EpisodeFailed)
            expect(fine, f"after a failure of the engine agent_close raises {type(error).__name__}: {error}")
        task = session.episodes()[0].task
        never = Episode("never-began", "never", task)
        try:
            session.wait(session.manager.acall(subject.key, "agent_close", episode=never), "agent_close")
        except (RunError, UserError) as error:
            raise Broken(f"agent_close raises for an episode whose reset failed (state None): {error}") from error
        expect(_played(session.play()) == before, "after failed episodes the next ones go otherwise")


@check("agent_run")
def failures_of_the_engine_come_out(subject: Subject) -> None:
    """When the policy cannot answer, ``agent_run`` raises: half an episode is not a short one."""
    with Session(subject) as session:
        for after in (0, 1):
            engine = _Failing(session.engine().script, limit=after)
            try:
                session.play(session.episodes(samples=1)[:1], engine)
            except (_EngineDown, EpisodeFailed, RunError, UserError):
                continue
            reached = len(engine.calls) < after
            expect(reached, "the engine's failure is swallowed and a trajectory returned; let it out or raise EpisodeFailed")
