"""A run in miniature for rewards and agents: started and finished, one event loop in its own thread, scripted words."""

from __future__ import annotations

import asyncio
import functools
import threading
import zlib
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from rlhf_host.config.schema import DataConfig, RunConfig
from rlhf_host.data.chat import render_prompt
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.records.episodes import Episode, Generation, SampleKey, Sampling, Segment, Task, Trajectory
from rlhf_host.records.needs import Outcome, RunContext, ScoreContext
from rlhf_host.rollouts.episodes import Episodes, episode_seed
from rlhf_host.testing.contracts.subject import Broken, Subject
from rlhf_host.testing.engines import ScriptedEngine
from rlhf_host.testing.models import tiny_tokenizer

T = TypeVar("T")

TASKS = (
    Task("2+2=", "4", index=0, source="made_up"),
    Task("what is the capital of france?", "paris", index=1, source="made_up"),
)
TEXTS = ("i do not know", "", "2+2=5", "the answer is 4.", "#### 4", "paris", "4")
MAX_TOKENS = 512
MAX_NEW_TOKENS = 48

tokenizer = functools.cache(tiny_tokenizer)


@dataclass(frozen=True, slots=True)
class MadeUpRole:
    """A role whose numbers are a fixed function of a trajectory's tokens."""

    name: str
    context_length: int = MAX_TOKENS

    @property
    def tokenizer(self) -> Any:
        return tokenizer()

    async def logprobs(self, trajectories: Sequence[Trajectory]) -> list[list[float]]:
        return [[-self._number(ids[: i + 1]) - 0.1 for i in range(len(ids))] for ids in map(_completion, trajectories)]

    async def values(self, trajectories: Sequence[Trajectory]) -> list[list[float]]:
        return [[self._number(ids[:i]) for i in range(len(ids))] for ids in map(_completion, trajectories)]

    async def scores(self, trajectories: Sequence[Trajectory]) -> list[float]:
        return [self._number(_completion(trajectory)) for trajectory in trajectories]

    def _number(self, ids: Sequence[int]) -> float:
        return zlib.crc32(f"{self.name} {list(ids)}".encode()) / 2**32


def _completion(trajectory: Trajectory) -> list[int]:
    return [token for segment in trajectory.completion for token in segment.token_ids]


def said(text: str, task: Task, sample: int = 0) -> Trajectory:
    """The trajectory of one answer; its tokens are the text's characters."""
    prompt = task.prompt if isinstance(task.prompt, str) else "\n".join(str(message["content"]) for message in task.prompt)
    ids = [ord(character) for character in text]
    return Trajectory(
        f"made-up-{task.index}-{sample}",
        f"made-up-{task.index}",
        task,
        [
            Segment("prompt", [ord(character) for character in prompt]),
            Segment("action", ids, [-0.5] * len(ids), [0] * len(ids)),
        ],
        sample=sample,
        decode=lambda tokens: "".join(map(chr, tokens)),
    )


@dataclass(slots=True)
class RecordingEngine(ScriptedEngine):
    """Keeps what it answered, gives the loop to others before it does, and refuses to go on without end."""

    limit: int = MAX_TOKENS
    answers: list[tuple[tuple[int, ...], Generation]] = field(default_factory=list)

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, key: SampleKey) -> Generation:
        if len(self.calls) >= self.limit:
            raise Endless(f"it still goes on after {self.limit} turns")
        asked = tuple(token_ids)
        await asyncio.sleep(0.001 * (len(asked) % 3))
        made = await ScriptedEngine.generate(self, token_ids, sampling, key)
        made.logprobs = [-0.5 - 0.001 * ((len(asked) + i) % 97) for i in range(len(made.token_ids))]
        self.answers.append((asked, Generation(list(made.token_ids), list(made.logprobs), list(made.versions), "stop")))
        return made


class Endless(Exception):
    """An episode took more turns than it may."""


class LoopThread:
    """An event loop that turns in a thread of its own."""

    def __init__(self, deadline_s: float):
        self.deadline_s = deadline_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rlhf-contract", daemon=True)
        self._thread.start()

    def wait(self, work: Coroutine[Any, Any, T], what: str) -> T:
        """The coroutine's result. Raises ``Broken`` when it is not there in time, the event loop blocked included."""
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(self.deadline_s)
        except TimeoutError:
            if future.done():
                raise
            future.cancel()
            raise Broken(f"{what} gave no answer in {self.deadline_s:g} s") from None

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._loop.shutdown_default_executor(), self._loop).result(self.deadline_s)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(1.0)
        if not self._thread.is_alive():
            self._loop.close()


class Session:
    """One fresh instance of the plugin in a run of its own. As a context manager: ``run_started``, ``run_finished``."""

    def __init__(
        self,
        subject: Subject,
        manager: PluginManager | None = None,
        *,
        run_dir: Path | None = None,
        resume_step: int | None = None,
    ):
        self.subject = subject
        self.run_dir, self.resume_step = run_dir, resume_step
        self.manager = subject.manager() if manager is None else manager
        self.roles = {role.name: MadeUpRole(role.name) for role in subject.needs.roles}

    def __enter__(self) -> Session:
        self._loop = LoopThread(self.subject.deadline_s)
        context = RunContext(
            RunConfig().model_dump(),
            tokenizer(),
            self.run_dir,
            0,
            self.roles,
            resumed=self.resume_step is not None,
            resume_step=self.resume_step or 0,
        )
        try:
            self._hook("run_started", context=context)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._hook("run_finished", outcome=Outcome("finished", 1))
        finally:
            self._stop()

    def _stop(self) -> None:
        self._loop.close()
        self.manager.close()

    def _hook(self, hook: str, **arguments: Any) -> None:
        for key in self.manager.names(hook):
            self.wait(self.manager.acall(key, hook, **arguments), hook)

    def wait(self, work: Coroutine[Any, Any, T], what: str) -> T:
        return self._loop.wait(work, what)

    # --- rewards ----------------------------------------------------------------------------------

    def judged(self) -> list[Trajectory]:
        """A group: the subject's texts (or the suite's) as answers to its first task."""
        return self.groups()[0]

    def groups(self) -> list[list[Trajectory]]:
        """One group of answers per task."""
        texts = self.subject.texts or TEXTS
        return [[said(text, task, sample) for sample, text in enumerate(texts)] for task in self.subject.tasks or TASKS]

    def score(self, trajectories: Sequence[Trajectory]) -> Any:
        """What the hook answers for one group."""
        return self.wait(self.scoring(trajectories), "score")

    async def scoring(self, trajectories: Sequence[Trajectory]) -> Any:
        context = ScoreContext("train", 1, self.roles, tokenizer())
        return await self.manager.acall(self.subject.key, "score", trajectories=trajectories, context=context)

    # --- agents -----------------------------------------------------------------------------------

    def engine(self, script: Callable[[Sequence[int], SampleKey], list[int]] | None = None, **settings: Any) -> RecordingEngine:
        """An engine that says the subject's texts in turn, each sample beginning with another."""
        return RecordingEngine(script or self._lines, version=3, **settings)

    def _lines(self, token_ids: Sequence[int], key: SampleKey) -> list[int]:
        texts = self.subject.texts or TEXTS
        words = tokenizer()
        return [*words(texts[sum(key[1:]) % len(texts)])["input_ids"], words.eos_token_id]

    def episodes(self, samples: int = 2) -> list[Episode]:
        """``samples`` episodes per task, as a rollout would make them."""
        words, data = tokenizer(), DataConfig()
        tasks = [
            replace(task, prompt_ids=tuple(render_prompt(task.prompt, words, data.system_prompt, data.template)))
            for task in self.subject.tasks or TASKS
        ]
        return [
            Episode(f"made-up-{number}-{i}", f"made-up-{number}", task, sample=i, seed=episode_seed(0, "train", task, 0))
            for number, task in enumerate(tasks)
            for i in range(samples)
        ]

    def play(
        self, episodes: Sequence[Episode] | None = None, engine: RecordingEngine | None = None, *, together: bool = False
    ) -> list[list[Trajectory]]:
        """The trajectories of each episode, played by the host's own code one after the other or all at once."""
        sampling = Sampling(max_new_tokens=MAX_NEW_TOKENS)
        words = tokenizer()
        runner = Episodes(self.manager, engine or self.engine(), words, DataConfig(), sampling, MAX_TOKENS)
        chosen = self.episodes() if episodes is None else episodes

        async def all_at_once() -> list[list[Trajectory]]:
            return list(await asyncio.gather(*(runner.play(episode) for episode in chosen)))

        if together:
            return self.wait(all_at_once(), "an episode")
        return [self.wait(runner.play(episode), "an episode") for episode in chosen]
