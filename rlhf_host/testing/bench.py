"""What each hook of a plugin costs: time and memory per call, at the sizes of a real run, on the CPU."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlhf_host.errors import RunError, UserError
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.records.episodes import Group, Reward, Segment, Task, Trajectory
from rlhf_host.records.tensors import Batch, Experience, LossTerm, Outputs
from rlhf_host.rollouts.experience import apply_rewards
from rlhf_host.testing.contracts.batches import VOCABULARY, WEIGHTS, advantages_by, make_batch, noise
from rlhf_host.testing.contracts.session import TASKS, TEXTS, Session, said
from rlhf_host.testing.contracts.subject import Broken, Subject
from rlhf_host.testing.contracts.training import Bigram, items_of, online, trainable
from rlhf_host.testing.engines import ScriptedEngine
from rlhf_host.training.corrections import correction_weights
from rlhf_host.training.update import ask

GROUP = 8
CHARACTERS = 2000
"""Length of an answer that rewards judge."""
LOGGED = 60
"""Metrics of a step."""
TASKS_READ = 10_000
FEWEST, MOST, ENOUGH_S = 3, 50, 2.0
"""Calls that are timed: at least, at most, and no more once so much time has passed."""

ON_BATCH = ("transform_rewards", "shape_rewards", "loss_masks", "compute_advantages")
ON_EPISODES = ("agent_reset", "agent_step", "agent_close", "agent_run")
NOT_ALONE = ("run_started", "run_finished", "sync_connect", "sync_weights", "sync_close")


@dataclass(frozen=True, slots=True)
class Cost:
    """What one hook costs. Without ``problem``, ``median_s`` and ``peak_bytes`` are there."""

    hook: str
    size: str = ""
    """What one call was given."""
    median_s: float | None = None
    peak_bytes: int | None = None
    """Most memory held at once beyond what was there before the call: tensors and Python objects, of this process alone."""
    calls: int = 0
    problem: str = ""
    """Why it was not measured."""


Call = tuple[Callable[[], Any], Callable[[Any], Any]]
"""What makes a call's arguments (not measured), and the call itself."""


def bench(subject: Subject, *, rows: int | None = None, tokens: int = 1024) -> Iterator[Cost]:
    """The cost of every hook the plugin implements, in the order of the contract.

    Args:
        subject: the plugin, with its options.
        rows: trajectories of a batch or of what is judged; default: 1024 for batches, 512 for rewards, agents and trackers.
        tokens: longest completion of a batch.
    """
    subject.deadline_s = 600.0
    with tempfile.TemporaryDirectory(prefix="rlhf-bench-") as folder:
        manager = subject.manager()
        with Session(subject, manager, run_dir=Path(folder)) as session:
            hooks = manager.hooks(subject.key)
            calls = _Calls(subject, manager, session, rows, tokens)
            for hook in hooks:
                if hook in NOT_ALONE:
                    yield Cost(hook, problem="needs a run")
                    continue
                if hook in ON_EPISODES and hook != next(one for one in hooks if one in ON_EPISODES):
                    continue  # measured together
                yield from _costs(hook, calls)


def _costs(hook: str, calls: _Calls) -> Iterator[Cost]:
    try:
        for name, size, (prepare, call) in calls.of(hook):
            yield _cost(name, size, prepare, call)
    except (RunError, UserError, Broken, ValueError) as error:
        yield Cost(hook, problem=f"failed: {' '.join(str(error).split())}")
    except _Unfit as error:
        yield Cost(hook, problem=str(error))


def _cost(name: str, size: str, prepare: Callable[[], Any], call: Callable[[Any], Any]) -> Cost:
    call(prepare())  # warms up
    times: list[float] = []
    while len(times) < FEWEST or (len(times) < MOST and sum(times) < ENOUGH_S):
        argument = prepare()
        start = time.perf_counter()
        call(argument)
        times.append(time.perf_counter() - start)
    return Cost(name, size, statistics.median(times), object_bytes(prepare, call) + tensor_bytes(prepare, call), len(times))


def object_bytes(prepare: Callable[[], Any], call: Callable[[Any], Any]) -> int:
    """Most bytes of Python objects, of all threads, that ``call(prepare())`` holds at once."""
    argument = prepare()
    tracemalloc.start()
    try:
        call(argument)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def tensor_bytes(prepare: Callable[[], Any], call: Callable[[Any], Any]) -> int:
    """Most bytes of CPU tensors, allocated by this thread, that ``call(prepare())`` holds at once."""
    from torch.profiler import ProfilerActivity, profile

    argument = prepare()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call(argument)
    assert profiled.profiler is not None
    assert profiled.profiler.kineto_results is not None
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(sizes, initial=0))


class _Unfit(Exception):
    """The hook cannot be called like this."""


class _Calls:
    """Ways of calling the hooks of one plugin."""

    def __init__(self, subject: Subject, manager: PluginManager, session: Session, rows: int | None, tokens: int):
        self.subject, self.manager, self.session = subject, manager, session
        self.rows, self.judged, self.tokens = rows or 1024, rows or 512, tokens
        self._groups: list[Group] = []

    def of(self, hook: str) -> Iterator[tuple[str, str, Call]]:
        """Name, size and call of each measurement of the hook."""
        if hook in ON_BATCH:
            yield hook, self._batch_size, self._on_batch(hook)
        elif hook in ON_EPISODES:
            named = ", ".join(name for name in ON_EPISODES if name in self.subject.hooks)
            yield named, f"{self.judged} episodes at once", self._episodes()
        elif hook == "score":
            groups = -(-self.judged // GROUP)
            yield hook, f"{self.judged} trajectories of {CHARACTERS} characters, {groups} groups at once", self._score()
        elif hook in ("compute_loss", "batch_statistics"):
            yield from self._worker(hook)
        else:
            yield self._other(hook)

    @property
    def groups(self) -> list[Group]:
        """The batch's groups, made when first needed."""
        if not self._groups:
            self._groups = [_group(number, rows, self.tokens) for number, rows in enumerate(_sizes(self.rows))]
        return self._groups

    @property
    def _batch_size(self) -> str:
        return f"{self.rows} × {self.tokens} tokens"

    def _on_batch(self, hook: str) -> Call:
        batch = self._rewarded()

        def call(given: Experience) -> Any:
            more = {"rewards": given.rewards} if hook == "transform_rewards" else {}
            return self.manager.call(self.subject.key, hook, experience=given, **more)

        return lambda: _copy(batch), call

    def _rewarded(self) -> Experience:
        batch = make_batch(self.subject, self.groups)
        apply_rewards(batch, self.manager)
        return batch

    def _learned(self) -> Batch:
        """The batch as workers get it."""
        if not online(self.subject):
            raise _Unfit(f"trains on {self.subject.needs.data} data, of which there is none here")
        batch = make_batch(self.subject, self.groups)
        if "compute_advantages" in self.subject.hooks:
            advantages_by(self.manager, batch, shaped=False)
        else:
            apply_rewards(batch, self.manager)
            batch.advantages = batch.returns = torch.where(batch.action_mask, noise(batch, 70), 0.0)
        batch.old_logprobs = torch.where(batch.action_mask, batch.sampler_logprobs + 0.1 * noise(batch, 72), 0.0)
        for key, given in self.manager.each("prepare_batch", experience=batch):
            batch.extra[self.manager.by_key[key].alias] = given
        return batch.batch()

    def _worker(self, hook: str) -> Iterator[tuple[str, str, Call]]:
        batch = self._learned()
        for role, head in trainable(self.subject).items():
            model = Bigram()

            def prepare(head: str = head, model: Bigram = model) -> tuple[Batch, Outputs]:
                return _copy(batch), model(head, batch, self.subject.needs.outputs)

            if hook == "batch_statistics":

                def statistics_call(given: Any, role: str = role) -> Any:
                    with torch.no_grad():
                        return list(ask(self.manager, hook, given[0], role=role, outputs=given[1]))

                yield f"{hook} ({role})", self._batch_size, (prepare, statistics_call)
                continue

            def forward(given: Any, role: str = role) -> list[Any]:
                return items_of(self.manager, role, given[1], given[0])

            def backward(given: Any, role: str = role) -> None:
                terms = [
                    item.values.sum() for item in items_of(self.manager, role, given[1], given[0]) if isinstance(item, LossTerm)
                ]
                total = sum(terms)
                if isinstance(total, torch.Tensor) and total.requires_grad:
                    total.backward()

            yield f"{hook} ({role})", self._batch_size, (prepare, forward)
            yield f"{hook} ({role}) and backward", self._batch_size, (prepare, backward)

    def _score(self) -> Call:
        tasks = self.subject.tasks or TASKS
        texts = [_long(text) for text in self.subject.texts or TEXTS]
        groups = [
            [said(texts[sample % len(texts)], tasks[number % len(tasks)], GROUP * number + sample) for sample in range(size)]
            for number, size in enumerate(_sizes(self.judged))
        ]

        async def all_at_once() -> None:
            await asyncio.gather(*(self.session.scoring(group) for group in groups))

        return lambda: None, lambda _: self.session.wait(all_at_once(), "score")

    def _episodes(self) -> Call:
        tasks = self.subject.tasks or TASKS

        def episodes() -> Any:
            return self.session.episodes(samples=-(-self.judged // len(tasks)))[: self.judged]

        def play(given: Any) -> None:
            engine: Any = ScriptedEngine(self.session.engine().script)
            self.session.play(given, engine, together=True)

        return episodes, play

    def _other(self, hook: str) -> tuple[str, str, Call]:
        def calls(**arguments: Any) -> Any:
            return self.manager.call(self.subject.key, hook, **arguments)

        metrics = {f"metric/{number}": number / LOGGED for number in range(LOGGED)}
        if hook == "importance_weights":
            batch = self._learned()
            now = Outputs(logprobs=batch.old_logprobs)
            return (
                hook,
                self._batch_size,
                (lambda: None, lambda _: correction_weights(self.manager, now, batch, gates_only=False)),
            )
        if hook == "keep_group":
            return hook, f"a group of {GROUP}", (lambda: self.groups[0], lambda group: calls(group=group))
        if hook == "make_rows":
            return hook, f"{len(self.groups)} groups of {GROUP}", (lambda: self.groups, lambda groups: calls(groups=groups))
        if hook == "load_tasks":
            return hook, f"the first {TASKS_READ} tasks", (lambda: None, lambda _: _read(calls(split="train", seed=0)))
        if hook == "step_finished":
            return hook, f"{LOGGED} metrics", (lambda: metrics, lambda given: calls(step=1, metrics=given))
        if hook == "log_metrics":
            return hook, f"{LOGGED} metrics", (lambda: metrics, lambda given: calls(step=1, metrics=given))
        if hook == "log_trajectories":
            rows = self._said()
            return (
                hook,
                f"{len(rows)} trajectories",
                (lambda: rows, lambda given: calls(step=1, split="train", trajectories=given)),
            )
        if hook == "load_state_dict":
            state = self.manager.call(self.subject.key, "state_dict")
            return hook, "its own state", (lambda: state, lambda given: calls(state=given))
        if hook in ("needs", "state_dict"):
            return hook, "", (lambda: None, lambda _: calls())
        raise _Unfit("is not measured")

    def _said(self) -> list[Trajectory]:
        rows = [said(_long(TEXTS[sample % len(TEXTS)]), TASKS[0], sample) for sample in range(self.judged)]
        for row in rows:
            row.rewards, row.reward = {"made_up": Reward(1.0)}, 1.0
        return rows


def _read(found: Any) -> int:
    return sum(1 for _ in itertools.islice(found or (), TASKS_READ))


def _sizes(rows: int) -> list[int]:
    return [min(GROUP, rows - start) for start in range(0, rows, GROUP)]


def _group(number: int, size: int, tokens: int) -> Group:
    """Answers of a quarter of ``tokens`` to all of them."""
    random = torch.Generator().manual_seed(number)
    task = Task("made up", "4", index=number, source="made_up", prompt_ids=(3, 4, 5, 6))
    rows = []
    for sample in range(size):
        longest = number == sample == 0
        length = tokens if longest else int(torch.randint(max(tokens // 4, 1), tokens + 1, (), generator=random))
        ids = torch.randint(3, VOCABULARY, (length,), generator=random).tolist()
        logprobs = (-torch.rand(length, generator=random) - 0.1).tolist()
        own = torch.randn(len(WEIGHTS), generator=random).tolist()
        rows.append(
            Trajectory(
                f"made-up-{number}-{sample}",
                f"made-up-{number}",
                task,
                [Segment("prompt", list(task.prompt_ids or ())), Segment("action", ids, logprobs, [0] * length)],
                finish_reason="length" if length == tokens else "stop",
                sample=sample,
                rewards={name: Reward(value) for name, value in zip(WEIGHTS, own, strict=True)},
                reward=sum(WEIGHTS[name] * value for name, value in zip(WEIGHTS, own, strict=True)),
                score=float(own[0] > 0),
                decode=lambda ids: " ".join(map(str, ids)),
            )
        )
    return Group(f"made-up-{number}", task, rows)


def _long(text: str) -> str:
    """``text`` as the end of an answer that thinks aloud."""
    steps = "".join(
        f"step {i}: {7 * i} + {i} = {8 * i}, so we carry {i % 3} and go on.\n" for i in range(1, 1 + CHARACTERS // 30)
    )
    return steps[: max(0, CHARACTERS - len(text) - 1)] + "\n" + text


def _copy(batch: Batch) -> Batch:
    """A batch of its own for each call; tensors are shared."""
    return dataclasses.replace(
        batch, logprobs=dict(batch.logprobs), values=dict(batch.values), stats=dict(batch.stats), extra=dict(batch.extra)
    )
