"""A run in miniature for rewards and agents: started and finished, one event loop in its own thread, scripted words."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import threading
import time
import zlib
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from rlhf_authoring.contracts.subject import Broken, Subject, check
from rlhf_authoring.engines import ScriptedEngine
from rlhf_authoring.models import tiny_tokenizer
from rlhf_host import Episode, Generation, Outcome, RunContext, SampleKey, Sampling, ScoreContext, Segment, Task, Trajectory
from rlhf_host.internals import (
    Episodes,
    EpisodeSettings,
    Gate,
    PluginManager,
    SampledModel,
    episode_seed,
    plain_state,
    task_renderer,
)
from rlhf_host.rollouts import render_prompt
from rlhf_host.settings import DataConfig, RunConfig

T = TypeVar("T")
Script = Callable[[Sequence[int], SampleKey], list[int]]

TASKS = (
    Task("2+2=", "4", index=0, source="made_up"),
    Task("what is the capital of france?", "paris", index=1, source="made_up"),
)
TEXTS = ("i do not know", "", "2+2=5", "the answer is 4.", "#### 4", "paris", "4")
METRICS = dict.fromkeys(
    ("reward/mean", "score/mean", "length/mean", "loss", "grad_norm", "lr", "kl", "kl/update", "entropy"), 0.1
)
"""Metrics of a step."""
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

    async def logprobs(self, trajectories: Sequence[Trajectory], *, temperature: float | None = None) -> list[list[float]]:
        return [[-self._number(ids[: i + 1]) - 0.1 for i in range(len(ids))] for ids in map(_completion, trajectories)]

    async def topk(
        self, trajectories: Sequence[Trajectory], k: int, *, temperature: float | None = None
    ) -> list[list[dict[int, float]]]:
        likeliest = {token: -0.1 - token for token in range(k)}
        return [[dict(likeliest) for _ in ids] for ids in map(_completion, trajectories)]

    async def values(self, trajectories: Sequence[Trajectory]) -> list[list[float]]:
        return [[self._number(ids[:i]) for i in range(len(ids))] for ids in map(_completion, trajectories)]

    async def scores(self, trajectories: Sequence[Trajectory]) -> list[float]:
        return [self._number(ids) for ids in map(_completion, trajectories)]

    async def token_scores(self, trajectories: Sequence[Trajectory]) -> list[list[float]]:
        return [[self._number(ids[: i + 1]) for i in range(len(ids))] for ids in map(_completion, trajectories)]

    def _number(self, ids: list[int]) -> float:
        return zlib.crc32(f"{self.name} {ids}".encode()) / 2**32


def _completion(trajectory: Trajectory) -> list[int]:
    return [token for segment in trajectory.completion for token in segment.token_ids]


def answer_of(text: str, task: Task, sample: int = 0) -> Trajectory:
    """The trajectory of one answer; its tokens are the text's characters."""
    prompt = task.prompt if isinstance(task.prompt, str) else "\n".join(str(message["content"]) for message in task.prompt)
    ids = [ord(character) for character in text]
    return Trajectory(
        f"made-up-{task.index}-{sample}",
        f"made-up-{task.index}",
        task,
        [Segment("prompt", list(map(ord, prompt))), Segment("action", ids, [-0.5] * len(ids), [0] * len(ids))],
        sample=sample,
        decode=lambda tokens: "".join(map(chr, tokens)),
    )


class Endless(Exception):
    """An episode took more turns than it may."""


@dataclass(slots=True)
class RecordingEngine(ScriptedEngine):
    """Keeps what it answered, gives the loop to others before it does, and after ``limit`` answers raises ``error``."""

    limit: int = MAX_TOKENS
    error: Exception | None = None
    """Default: ``Endless``."""
    raised: bool = False
    """True once it has raised the error."""
    answers: list[tuple[tuple[int, ...], Generation]] = field(default_factory=list)

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, key: SampleKey) -> Generation:
        if len(self.calls) >= self.limit:
            self.raised = True
            raise self.error or Endless(f"it still goes on after {self.limit} turns")
        prompt = tuple(token_ids)
        await asyncio.sleep(0.001 * (len(prompt) % 3))
        answer = await ScriptedEngine.generate(self, token_ids, sampling, key)
        answer.logprobs = [-0.5 - 0.001 * ((len(prompt) + i) % 97) for i in range(len(answer.token_ids))]
        self.answers.append((prompt, Generation(list(answer.token_ids), list(answer.logprobs), list(answer.versions), "stop")))
        return answer


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

    @contextlib.contextmanager
    def watched(self) -> Iterator[list[float]]:
        """For how many seconds at a time the loop stood still meanwhile."""
        stops: list[float] = [0.0]

        async def watch() -> None:
            while True:
                before = time.monotonic()
                await asyncio.sleep(0.01)
                stops.append(time.monotonic() - before)

        watching = asyncio.run_coroutine_threadsafe(watch(), self._loop)
        try:
            yield stops
        finally:
            watching.cancel()

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._loop.shutdown_default_executor(), self._loop).result(self.deadline_s)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(1.0)
        if not self._thread.is_alive():
            self._loop.close()


@dataclass(frozen=True, slots=True)
class Session:
    """One instance of the plugin in a run of its own, as ``running`` gives it."""

    subject: Subject
    manager: PluginManager
    roles: dict[str, MadeUpRole]
    loop: LoopThread
    state: Mapping[str, Any] | None = None
    """State that ``state_dict`` gave when the run began, if the plugin takes it back."""

    def call(self, hook: str, **arguments: Any) -> Any:
        return self.loop.wait(self.manager.acall(self.subject.key, hook, **arguments), hook)

    def groups(self) -> list[list[Trajectory]]:
        """One group per task of the subject's (or the suite's): its texts as answers."""
        texts = self.subject.texts or TEXTS
        return [[answer_of(text, task, n) for n, text in enumerate(texts)] for task in self.subject.tasks or TASKS]

    def score(self, *groups: Sequence[Trajectory], restored: bool = True) -> list[Any]:
        """Returns what the hook answers for each group, all scored at once. ``restored``: by the plugin as it was when the run
        began, so that a state which judging moves is no difference between two calls.
        """
        if restored and self.state is not None:
            self.call("load_state_dict", state=copy.deepcopy(self.state))
        context = ScoreContext("train", 1, self.roles, tokenizer())

        async def at_once() -> list[Any]:
            score = functools.partial(self.manager.acall, self.subject.key, "score", context=context)
            return list(await asyncio.gather(*(score(trajectories=group) for group in groups)))

        return self.loop.wait(at_once(), "score")

    def engine(self, script: Script | None = None, **settings: Any) -> RecordingEngine:
        """An engine that says the subject's texts in turn, each sample beginning with another."""
        return RecordingEngine(script or self._lines, version=3, **settings)

    def _lines(self, token_ids: Sequence[int], key: SampleKey) -> list[int]:
        texts = self.subject.texts or TEXTS
        return [*tokenizer()(texts[sum(key[1:]) % len(texts)])["input_ids"], tokenizer().eos_token_id]

    def episodes(self, samples: int = 2) -> list[Episode]:
        """``samples`` episodes per task, as a rollout would make them."""
        data, episodes = DataConfig(), []
        for number, task in enumerate(self.subject.tasks or TASKS):
            prompt = render_prompt(task.prompt, tokenizer(), data.system_prompt, data.template)
            task, seed = replace(task, prompt_ids=tuple(prompt)), episode_seed(0, "train", task, 0)
            name = f"made-up-{number}"
            episodes += [Episode(f"{name}-{sample}", name, task, sample=sample, seed=seed) for sample in range(samples)]
        return episodes

    def play(
        self,
        episodes: Sequence[Episode] | None = None,
        engine: ScriptedEngine | None = None,
        *,
        together: bool = False,
        max_tokens: int = MAX_TOKENS,
    ) -> list[list[Trajectory]]:
        """The trajectories of each episode, played by the host's own code one after the other or all at once."""
        sampling = Sampling(max_new_tokens=MAX_NEW_TOKENS)
        model = SampledModel(engine=Gate(engine or self.engine()), tokenizer=tokenizer())
        limits = EpisodeSettings(sampling=sampling, max_tokens=max_tokens, strict=True)
        frozen = {need.name: Episodes(self.manager, model, limits) for need in self.subject.needs.roles if need.generates}
        runner = Episodes(self.manager, model, limits, frozen=frozen)
        chosen = self.episodes() if episodes is None else episodes

        async def at_once() -> list[list[Trajectory]]:
            return list(await asyncio.gather(*map(runner.play, chosen)))

        if together:
            return self.loop.wait(at_once(), "an episode")
        return [self.loop.wait(runner.play(episode), "an episode") for episode in chosen]


@contextlib.contextmanager
def running(
    subject: Subject, manager: PluginManager | None = None, *, run_dir: Path | None = None, resume_step: int | None = None
) -> Iterator[Session]:
    """A run of a fresh instance, or of ``manager``'s: from ``check_run`` to ``run_finished``."""
    roles = {role.name: MadeUpRole(role.name) for role in subject.needs.roles}
    resumed, settings = resume_step is not None, RunConfig(reward={"made_up": {"name": "made_up"}}).model_dump()
    render = task_renderer(tokenizer(), RunConfig().data)
    context = RunContext(settings, tokenizer(), run_dir, 0, roles, resumed, resume_step or 0, render=render)
    closing = contextlib.closing
    with closing(manager or subject.manager()) as plugins, closing(LoopThread(subject.deadline_s)) as loop:
        session = Session(subject, plugins, roles, loop)
        session.call("check_run", config=settings, tokenizers={name: tokenizer() for name in ("actor", *roles)})
        session.call("run_started", context=context)
        if {"state_dict", "load_state_dict"} <= subject.hooks:
            session = replace(session, state=copy.deepcopy(plain_state(plugins.call(subject.key, "state_dict"), subject.key)))
        try:
            yield session
        finally:
            session.call("run_finished", outcome=Outcome("finished", 1))


def check_running(*hooks: str) -> Callable[[Callable[[Session], None]], Callable[[Subject], None]]:
    """As ``check``, of a function that is given a fresh instance in a run of its own."""

    def add(function: Callable[[Session], None]) -> Callable[[Subject], None]:
        @functools.wraps(function)
        def run(subject: Subject) -> None:
            with running(subject) as session:
                function(session)

        return check(*hooks)(run)

    return add
