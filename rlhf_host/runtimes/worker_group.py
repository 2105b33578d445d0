"""Groups of training workers that act as one trainer: rows are dealt out over ranks, what comes back is put together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from rlhf_host.errors import LostError, RunError, UserError
from rlhf_host.protocols import Update
from rlhf_host.records.tensors import Batch, TopK
from rlhf_host.runtimes.batch_shards import Shard, deal_rows, make_shard
from rlhf_host.training.reduction import Denominators, Metrics
from rlhf_host.training.worker import place

T = TypeVar("T")


@dataclass(slots=True)
class WorkerGroup:
    """The processes that train or hold the same roles. ``actors`` are Ray handles, rank by rank."""

    name: str
    actors: list[Any]
    roles: tuple[str, ...]
    trainable: tuple[str, ...]
    parts: int = 1
    """Neighbours that hold one copy of the models between them: they are given the same rows, and their answers are one."""
    _order: threading.Lock = field(default_factory=threading.Lock)

    @property
    def size(self) -> int:
        return len(self.actors)

    @property
    def ranks(self) -> int:
        """Among how many the rows of a batch are dealt out."""
        return self.size // self.parts

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """References to every process's answer to the same call."""
        return self.call_each(method, [arguments] * self.size)

    def call_each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        # Calls may be collective: all processes must get two threads' calls in the same order.
        with self._order:
            return [getattr(actor, method).remote(*own) for actor, own in zip(self.actors, arguments, strict=True)]

    def call_ranks(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """As ``call_each`` with the arguments of each rank for all its processes."""
        return self.call_each(method, [own for own in arguments for _ in range(self.parts)])


class RemoteTrainer:
    """``protocols.Trainer`` over groups; those with different roles work at the same time."""

    def __init__(self, groups: Sequence[WorkerGroup], *, unit_rows: bool):
        self.groups = list(groups)
        self.trained = [group for group in groups if group.trainable]
        self.by_role = {role: group for group in groups for role in group.roles}
        self.unit_rows = unit_rows
        self.compute_s = 0.0
        self.ahead = False
        """The weights have been trained since the engines got them."""
        self.still = threading.Lock()
        """No update begins while this is held."""
        self.before: Callable[[bool], None] | None = None
        """Called before workers compute, with whether a role that is trained does."""

    def outputs(self, role: str, what: Literal["logprobs", "values", "scores"], batch: Batch) -> Tensor:
        shape = batch.completion_mask.shape[: 1 if what == "scores" else 2]
        return self._compute("outputs", role, (what,), batch, torch.zeros(shape))[0]

    def topk(self, role: str, k: int, batch: Batch) -> TopK:
        shape = (*batch.completion_mask.shape, k)
        return TopK(*self._compute("topk", role, (k,), batch, torch.zeros(shape), torch.zeros(shape, dtype=torch.int64)))

    def _compute(
        self, method: str, role: str, arguments: tuple[Any, ...], batch: Batch, *results: Tensor
    ) -> tuple[Tensor, ...]:
        """``results`` with what the workers' method of that name gives for their rows."""
        group = self.by_role[role]
        if self.before is not None:
            self.before(role in group.trainable)
        shards = _Shards(batch, self.unit_rows)
        calls = [(method, role, arguments, reference) for reference in shards.references(group.ranks)]
        answers = wait_all(group.call_ranks("compute", calls), group.name)
        self.compute_s += max(seconds for _, seconds in answers)
        for rows, (parts, _) in zip(shards.rows(group.ranks), answers[:: group.parts], strict=True):
            for result, part in zip(results, parts, strict=True):
                if rows:
                    place(result, rows, torch.tensor(part))
        return results

    def adjust(self, role: str, *, lr: float) -> None:
        group = self.by_role[role]
        wait_all(group.call("adjust", role, lr), group.name)

    def update(self, batch: Batch, *, sampled_now: bool) -> Update:
        """One optimizer batch in every group that trains; the losses of each are divided by counts over the whole batch."""
        import ray

        shards = _Shards(batch, self.unit_rows)
        whole = ray.put(Denominators.of(batch))
        with self.still:
            self.ahead = True
        if self.before is not None:
            self.before(True)
        references = [
            group.call_ranks("update", [(ref, whole, sampled_now) for ref in shards.references(group.ranks)])
            for group in self.trained
        ]
        names = [group.name for group in self.trained for _ in range(group.size)]
        answers: list[tuple[Update, float]] = wait_all([ref for own in references for ref in own], *names)
        self.compute_s += max((seconds for _, seconds in answers), default=0.0)
        whole_update = Update(Metrics())
        for update, _ in answers:
            whole_update.metrics.join(update.metrics)
            whole_update.refused = whole_update.refused or update.refused
        return whole_update


class _Shards:
    """A batch's shards, put into the object store once per number of ranks."""

    def __init__(self, batch: Batch, unit_rows: bool):
        self._batch, self._unit_rows = batch, unit_rows
        self._by_count: dict[int, tuple[list[list[int]], list[Any]]] = {}

    def references(self, count: int) -> list[Any]:
        return self._for(count)[1]

    def rows(self, count: int) -> list[list[int]]:
        return self._for(count)[0]

    def _for(self, count: int) -> tuple[list[list[int]], list[Any]]:
        import ray

        if count not in self._by_count:
            rows = deal_rows(self._batch, count, unit_rows=self._unit_rows)
            shards: Iterable[Shard] = (make_shard(self._batch, own) for own in rows)
            self._by_count[count] = rows, [ray.put(shard) for shard in shards]
        return self._by_count[count]


def wait_all(references: Sequence[Any], *names: str, within_s: float | None = None) -> list[Any]:
    """All results, in order. The first failure is raised as soon as it is there: ranks that wait for a dead one never answer.

    Args:
        names: whose each reference is, for messages; one alone stands for all.
        within_s: longest wait for the next of them; default: no end.
    """
    import ray

    owners = dict(zip(references, names * len(references) if len(names) == 1 else names, strict=False))
    left = list(references)
    while left:
        done, left = ray.wait(left, num_returns=1, timeout=within_s)
        if not done:
            raise RunError(
                f"a worker of {owners[left[0]]} has not started within {within_s:g} s: see that ray.runtime_env can be made"
                " there, and Ray's own logs"
            )
        for reference in done:
            try:
                ray.get(reference)
            except ray.exceptions.RayError as error:
                raise plain_error(error, f"a worker of {owners[reference]}") from error
    return ray.get(list(references))


def plain_error(error: Exception, who: str) -> Exception:
    """What happened over there as an error of the project: a ``UserError`` or ``RunError`` as it was raised."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, UserError | RunError):
        return cause
    if cause is not None:
        return RunError(f"{who} failed: {type(cause).__name__}: {' '.join(str(cause).split())}")
    if type(error).__name__ == "ActorUnavailableError":
        return LostError(f"{who} is lost (its process or its machine does not answer)")
    said = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no reason known"]
    # Where a process could not even be made, its own traceback follows, and the reason is the last line.
    made = not any(word in said[0] for word in ("creation task", "runtime environment", "runtime_env"))
    reason = said[0 if made else -1].rstrip(".")
    return LostError(f"{who} is lost ({type(error).__name__}: {reason})")
