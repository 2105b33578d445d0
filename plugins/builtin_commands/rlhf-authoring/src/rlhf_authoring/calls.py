"""Each hook as a run calls it, with made-up arguments of a chosen size."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from rlhf_authoring.contracts.batches import make_batch, make_groups
from rlhf_authoring.contracts.offline_batches import make_units, offline_batch
from rlhf_authoring.contracts.session import METRICS, TASKS, TEXTS, Session, answer_of
from rlhf_authoring.contracts.training import Bigram, trainable, training_batch
from rlhf_authoring.engines import ScriptedEngine
from rlhf_host import Batch, Experience, Group, LossTerm, Outputs, Reward, Trajectory
from rlhf_host.internals import apply_rewards, ask, correction_weights

GROUP = 8
CHARACTERS = 2000
"""Length of an answer that rewards judge."""
LOGGED = 60
"""Metrics of a step."""
TASKS_READ = 10_000

ON_EPISODES = ("agent_reset", "agent_step", "agent_close", "agent_run")


class Unfit(Exception):
    """The hook cannot be called like this."""


@dataclass(frozen=True, slots=True)
class Call:
    """One way to call a hook: ``run(prepare())``, where ``prepare`` makes the arguments."""

    name: str
    size: str
    """Size of what one call is given."""
    run: Callable[[Any], Any]
    prepare: Callable[[], Any] = lambda: None


class Calls:
    """Ways of calling the hooks of one plugin.

    Args:
        rows: of a batch.
        judged: trajectories to judge, play or log.
        tokens: longest completion of a batch.
    """

    def __init__(self, session: Session, rows: int, judged: int, tokens: int):
        self.session, self.subject, self.manager = session, session.subject, session.manager
        self.rows, self.judged, self.tokens = rows, judged, tokens
        self.batch_size = f"{rows} × {tokens} tokens"

    def of(self, hook: str) -> Iterator[Call]:
        """Every way of calling the hook; none where another hook's is its own too. Raises ``Unfit`` for what takes a run."""
        if hook in ON_EPISODES:
            names = [name for name in ON_EPISODES if name in self.subject.hooks]
            if hook == names[0]:
                yield Call(", ".join(names), f"{self.judged} episodes at once", self._play, self._episodes)
        elif hook == "score":
            groups = [self.answers[start : start + GROUP] for start in range(0, self.judged, GROUP)]
            size = f"{self.judged} trajectories of {CHARACTERS} characters, {len(groups)} groups at once"
            yield Call(hook, size, lambda _: self.session.score(*groups))
        elif hook == "importance_weights":
            now = Outputs(logprobs=self.trained.old_logprobs)
            yield Call(hook, self.batch_size, lambda _: correction_weights(self.manager, now, self.trained, gates_only=False))
        elif hook in ("compute_loss", "batch_statistics"):
            yield from self._of_roles(hook)
        else:
            size, arguments = self._arguments(hook)
            call = partial(self.manager.call, self.subject.key, hook)
            read = _read_tasks if hook == "load_tasks" else lambda answer: answer
            yield Call(hook, size, lambda arguments: read(call(**arguments)), arguments)

    def _arguments(self, hook: str) -> tuple[str, Callable[[], dict[str, Any]]]:
        metrics = {**{f"metric/{number}": number / LOGGED for number in range(LOGGED - len(METRICS))}, **METRICS}
        logged = {"step": 1, "split": "train"}
        offline = self.subject.offline
        batch = self.batch_size, lambda: {"experience": _copy(self.batch)}
        step = f"{LOGGED} metrics", lambda: {"step": 1, "metrics": metrics}
        ways: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
            "needs": ("", dict),
            "load_tasks": (f"the first {TASKS_READ} tasks", lambda: {"split": "train", "seed": 0}),
            "draw_tasks": (f"{GROUP} tasks", lambda: {"tasks": TASKS, "count": GROUP, "step": 1}),
            "keep_group": (f"a group of {GROUP}", lambda: {"group": self.groups[0]}),
            "transform_rewards": (self.batch_size, lambda: {**batch[1](), "rewards": self.batch.rewards}),
            "shape_rewards": batch,
            "loss_masks": batch,
            "compute_advantages": batch,
            "prepare_batch": (self.batch_size, lambda: {"experience": _copy(self.trained)}),
            "make_rows": (f"{len(self.groups)} {'units' if offline else 'groups'}", lambda: {"groups": self.groups}),
            "step_finished": step,
            "step_metrics": ("", lambda: {"step": 1}),
            "log_metrics": step,
            "log_trajectories": (f"{self.judged} trajectories", lambda: {**logged, "trajectories": self.answers}),
            "state_dict": ("", dict),
            "load_state_dict": ("its own state", lambda: {"state": self.manager.call(self.subject.key, "state_dict")}),
        }
        if hook not in ways:
            raise Unfit("is not measured")
        return ways[hook]

    def _of_roles(self, hook: str) -> Iterator[Call]:
        """For each trained role, a batch and the outputs of its model."""
        batch = self.trained.batch()
        for role, head in trainable(self.subject).items():

            def prepare(head: str = head) -> tuple[Batch, Outputs]:
                return _copy(batch), Bigram()(head, batch, self.subject.needs.outputs)

            call = Call(f"{hook} ({role})", self.batch_size, partial(self._items, hook, role), prepare)
            yield call
            if hook == "compute_loss":
                yield dataclasses.replace(call, name=f"{call.name} and backward", run=partial(self._backward, call.run))

    def _items(self, hook: str, role: str, arguments: tuple[Batch, Outputs]) -> list[Any]:
        batch, outputs = arguments
        with torch.set_grad_enabled(hook == "compute_loss"):
            return [item for _, item in ask(self.manager, hook, batch, role=role, outputs=outputs)]

    def _backward(self, loss_items: Callable[[Any], list[Any]], arguments: Any) -> None:
        total: Any = sum(item.values.sum() for item in loss_items(arguments) if isinstance(item, LossTerm))
        if isinstance(total, Tensor) and total.requires_grad:
            total.backward()

    def _episodes(self) -> Any:
        return self.session.episodes(samples=-(-self.judged // len(self.subject.tasks or TASKS)))[: self.judged]

    def _play(self, episodes: Any) -> None:
        self.session.play(episodes, ScriptedEngine(self.session.engine().script), together=True)

    @cached_property
    def groups(self) -> list[Group]:
        """Answers of a quarter of ``tokens`` to all of them, or units of the data set that its plugin trains on."""
        if self.subject.offline:
            data = str(self.subject.needs.data)
            return make_units(data, max(1, self.rows // {"preference": 2, "triple": 3}.get(data, 1)), longest=self.tokens)
        sizes = [min(GROUP, self.rows - start) for start in range(0, self.rows, GROUP)]
        spread = 3 * self.tokens // 4 + 1
        return make_groups(sizes, length=lambda group, sample, turn: self.tokens - (7919 * group + 104729 * sample) % spread)

    @cached_property
    def batch(self) -> Experience:
        """Rewards applied, or of units."""
        if self.subject.offline:
            return self.trained
        batch = make_batch(self.subject, self.groups)
        apply_rewards(batch, self.manager)
        return batch

    @cached_property
    def trained(self) -> Experience:
        """As workers get it."""
        if self.subject.offline:
            return offline_batch(self.subject, self.manager, self.groups)
        return training_batch(self.subject, self.manager, self.groups)

    @cached_property
    def answers(self) -> list[Trajectory]:
        """Judged answers, group by group to the same task, each at the end of one that thinks aloud."""
        tasks, texts = self.subject.tasks or TASKS, self.subject.texts or TEXTS
        steps = "".join(f"step {i}: {7 * i} + {i} = {8 * i}, so we carry {i % 3} and go on.\n" for i in range(CHARACTERS // 30))
        rows = []
        for number in range(self.judged):
            text, task = texts[number % GROUP % len(texts)], tasks[number // GROUP % len(tasks)]
            row = answer_of(f"{steps[: max(0, CHARACTERS - len(text) - 1)]}\n{text}", task, number)
            row.rewards, row.reward = {"made_up": Reward(1.0)}, 1.0
            rows.append(row)
        return rows


def _read_tasks(tasks: Iterable[Any] | None) -> int:
    return sum(1 for _ in islice(tasks or (), TASKS_READ))


def _copy(batch: Any) -> Any:
    """A batch of its own for each call; tensors are shared."""
    return batch.map(lambda name, tensor: tensor)
