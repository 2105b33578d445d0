"""Episodes that somebody outside plays: what the policy is asked comes out, its answers go in, and a reward at the end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rlhf_environments.policy import Answer, Question, TextEpisodes
from rlhf_environments.text_tokens import text_tokenizer
from rlhf_host import Episode, EpisodeFailed, ScoreContext, Task, Trajectory
from rlhf_host.internals import PluginManager, episode_seed, judges, score_group
from rlhf_host.settings import RunConfig

MOST_SEED = 1 << 63


class Full(EpisodeFailed):
    """Refusal of a further episode: as many are open as may be."""


@dataclass(frozen=True, slots=True)
class Result:
    """Worth of an episode."""

    reward: float
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Rewards of the plugins, before their weights; ``agent``: the agent's own."""
    score: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    truncated: bool = False

    @property
    def told(self) -> dict[str, Any]:
        return asdict(self)


class Play:
    """One open episode. Ask it for its first ``turn``, then ``answer`` until that gives a ``Result``."""

    def __init__(self, environment: Environment, episode: Episode, *, counts: bool = True):
        self.environment, self.episode, self.counts = environment, episode, counts
        self.answers: list[Answer] = []
        """Answers of the policy so far."""
        self.used = time.monotonic()
        self._questions: asyncio.Queue[Question] = asyncio.Queue()
        self._given: asyncio.Future[Answer] | None = None
        self._one_at_a_time, self._turns = asyncio.Lock(), asyncio.Lock()
        self._running = asyncio.create_task(environment.run(episode, self._ask))

    @property
    def over(self) -> bool:
        return self._running.done()

    async def _ask(self, question: Question) -> Answer:
        async with self._one_at_a_time:  # an agent may ask several things side by side: they are answered in turn
            given = self._given = asyncio.get_running_loop().create_future()
            self._questions.put_nowait(question)
            return await given

    async def turn(self) -> Question | Result:
        """Waits for the next question, or for the end. Raises ``EpisodeFailed`` where the episode failed or has no reward."""
        asked = asyncio.ensure_future(self._questions.get())
        try:
            await asyncio.wait([asked, self._running], return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                return asked.result()
        finally:
            asked.cancel()
            self.used = time.monotonic()
        if self._running.cancelled():
            raise EpisodeFailed("the episode was closed")
        return self._running.result()

    async def answer(self, answer: Answer) -> Question | Result:
        """Gives the policy's answer, and waits for what comes of it. Raises ``EpisodeFailed`` as ``turn`` does."""
        async with self._turns:
            if self._given is None or self._given.done():
                raise EpisodeFailed("the episode is over: begin another one" if self.over else "the episode asks nothing yet")
            self.answers.append(answer)
            self._given.set_result(answer)
            return await self.turn()

    async def close(self) -> None:
        """Ends it, whatever it is doing, and frees what its agent holds."""
        self._running.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await self._running
        self.environment.opened.discard(self)


class Environment:
    """The tasks, the agent and the rewards of a configuration, played by somebody outside. All calls come from one event loop.

    Args:
        most: episodes that may be open at the same time.
        idle_s: an open episode that nobody has asked for so long is closed when room is needed.
    """

    def __init__(
        self,
        config: RunConfig,
        manager: PluginManager,
        tasks: Sequence[Task],
        episodes: TextEpisodes,
        *,
        most: int = 256,
        idle_s: float = 1800.0,
    ):
        self.config, self.manager, self.tasks, self.episodes = config, manager, tasks, episodes
        self.most, self.idle_s = most, idle_s
        self.opened: set[Play] = set()
        self._next = itertools.cycle(range(len(tasks)))
        self._samples: Counter[int] = Counter()
        self._numbers = itertools.count()
        self._judges = judges(manager, "train")

    async def start(self, task: int | None = None, seed: int | None = None, sample: int | None = None) -> tuple[Play, Question]:
        """Opens an episode; returns it and its first question.

        Args:
            task: index of the task, over all sources; default: each in turn.
            seed: of the episode's random numbers; default: that of the first epoch of a run with the same ``seed``.
            sample: which of the answers to the task it is, beginning with 0; default: counted.

        Raises:
            Full: too many are open.
            EpisodeFailed: there is no such task, or the agent could not begin.
        """
        for name, value, most in (("task", task, len(self.tasks)), ("seed", seed, MOST_SEED), ("sample", sample, MOST_SEED)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < most):
                raise EpisodeFailed(f"{name} {value!r}: a whole number from 0 to {most - 1}")
        await self._make_room()
        index = next(self._next) if task is None else task
        number = self._samples[index] if sample is None else sample
        self._samples[index] += sample is None
        chosen = self.tasks[index]
        return await self._open(chosen, number, episode_seed(self.config.seed, "train", chosen, 0) if seed is None else seed)

    async def again(self, play: Play) -> tuple[Play, Question]:
        """Opens the same episode once more, from its beginning. It does not count: its client has one open."""
        return await self._open(play.episode.task, play.episode.sample, play.episode.seed, counts=False)

    async def _open(self, task: Task, sample: int, seed: int, *, counts: bool = True) -> tuple[Play, Question]:
        place = f"{task.source}-{task.index}-{next(self._numbers)}"
        play = Play(self, Episode(place, place, task, sample, seed), counts=counts)
        self.opened.add(play)
        try:
            first = await play.turn()
            if isinstance(first, Result):
                raise EpisodeFailed("the agent ended the episode before it asked anything")
        except BaseException:
            await play.close()
            raise
        return play, first

    async def _make_room(self) -> None:
        if self._counted < self.most:
            return
        now = time.monotonic()
        for play in [play for play in self.opened if now - play.used > self.idle_s]:
            await play.close()
        if self._counted >= self.most:
            raise Full(f"{self._counted} episodes are open, which is all that may be: close some", retryable=True)

    @property
    def _counted(self) -> int:
        return sum(play.counts for play in self.opened)

    async def run(self, episode: Episode, ask: Any) -> Result:
        """Plays and scores an episode as a run does."""
        rows = await self.episodes.play_with(episode, ask)
        context = ScoreContext("train", 0, {}, text_tokenizer())
        await score_group(self.manager, self._judges, rows, context, self.config.rollout)
        return _result(rows)

    async def close(self) -> None:
        await asyncio.gather(*(play.close() for play in [*self.opened]))


def _result(rows: Sequence[Trajectory]) -> Result:
    final = [row for row in rows if row.final]
    if len(final) > 1:
        roles = ", ".join(row.role or "the policy" for row in final)
        raise EpisodeFailed(
            f"the episode has {len(final)} answers that are judged ({roles}), and one reward stands for one of them"
        )
    [row] = final
    if row.reward is None:
        raise EpisodeFailed(f"no reward could be given: {row.unjudged_reason}")
    rewards = {name: reward.total for name, reward in row.rewards.items() if reward is not None}
    return Result(row.reward, rewards, row.score, dict(row.metrics), row.truncated)
