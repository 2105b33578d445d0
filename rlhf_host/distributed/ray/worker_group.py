"""Groups of training workers that act as one trainer: rows are distributed over ranks, and results are put together."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlhf_host.distributed.ray.batch_shards import PASSES, TOKENS, UPDATES, deal_rows, make_shards
from rlhf_host.errors import LostError, RunError, UserError
from rlhf_host.models.flops import ModelFlops
from rlhf_host.plugins.specs import PluginSpec
from rlhf_host.protocols import Update
from rlhf_host.records.ragged import Rows
from rlhf_host.records.tensors import OF_ROWS, Batch, RoleOutput, TopK
from rlhf_host.training.reduction import Denominators, Metrics
from rlhf_host.training.worker import place

Dealt = tuple[list[list[int]], list[Any]]


@dataclass(slots=True)
class WorkerGroup:
    """The processes that train or hold the same roles. ``actors`` are Ray handles, rank by rank."""

    name: str
    actors: list[Any]
    roles: tuple[str, ...]
    trainable: tuple[str, ...]
    parts: int = 1
    """Number of neighbouring processes that hold one copy of the models together: they get the same rows, and return one
    answer.
    """
    _order: threading.Lock = field(default_factory=threading.Lock)

    @property
    def ranks(self) -> int:
        """Number of ranks over which the rows of a batch are distributed."""
        return len(self.actors) // self.parts

    def call(self, method: str, *arguments: Any, thread: str | None = None) -> list[Any]:
        """Returns references to every process's answer to the same call.

        Args:
            thread: the concurrency group for the call; default: the one that computes.
        """
        if thread is not None:
            return [getattr(actor, method).options(concurrency_group=thread).remote(*arguments) for actor in self.actors]
        return self.call_each(method, [arguments] * len(self.actors))

    def call_each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        # Calls may be collective: all processes must get two threads' calls in the same order.
        with self._order:
            return [getattr(actor, method).remote(*own) for actor, own in zip(self.actors, arguments, strict=True)]

    def call_ranks(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Does the same as ``call_each``, with the arguments of each rank for all its processes."""
        return self.call_each(method, [own for own in arguments for _ in range(self.parts)])


class RemoteTrainer:
    """A ``protocols.Trainer`` over groups; groups with different roles work at the same time."""

    def __init__(self, groups: Sequence[WorkerGroup], *, unit_rows: bool, flops: ModelFlops | None = None):
        """
        Args:
            unit_rows: as for ``deal_rows``.
            flops: of the role that most of the work is for; None: unknown, so that rows are dealt by tokens.
        """
        self.groups = list(groups)
        self.trained = [group for group in groups if group.trainable]
        self.by_role = {role: group for group in groups for role in group.roles}
        self.unit_rows, self.flops = unit_rows, flops or TOKENS
        self.compute_s = 0.0
        self.ahead = False
        """True if the weights have been trained since the engines got them."""
        self.still = threading.Lock()
        """Lock: no update begins while it is held."""
        self.before: Callable[[bool], None] | None = None
        """Called before workers compute, with True if a trained role does."""
        self._dealt: dict[int, tuple[weakref.ref[Tensor], Sequence[Any], Dealt]] = {}
        """By number of ranks: the completions and prompts that were distributed last, and how."""

    def outputs(self, role: str, what: RoleOutput, batch: Batch) -> Tensor:
        result = torch.zeros(len(batch)) if what in OF_ROWS else Rows.of(batch.completion_mask).zeros()
        return self._compute("outputs", role, (what,), batch, result)[0]

    def topk(self, role: str, k: int, batch: Batch) -> TopK:
        shape = Rows.of(batch.completion_mask)
        return TopK(*self._compute("topk", role, (k,), batch, shape.zeros(k), shape.zeros(k, dtype=torch.int64)))

    def _compute(
        self, method: str, role: str, arguments: tuple[Any, ...], batch: Batch, *results: Tensor
    ) -> tuple[Tensor, ...]:
        """Fills ``results`` with the values of the workers' method of that name for their rows."""
        group = self.by_role[role]
        if self.before is not None:
            self.before(role in group.trainable)
        rows_of_ranks, shards = self._deal(batch, group.ranks)
        calls = [(method, role, arguments, shard) for shard in shards]
        answers = wait_all(group.call_ranks("compute", calls), group.name)
        self.compute_s += max(seconds for _, seconds in answers)
        for rows, (parts, _) in zip(rows_of_ranks, answers[:: group.parts], strict=True):
            for result, part in zip(results, parts, strict=True):
                if rows:
                    place(result, rows, torch.tensor(part))
        return results

    def adjust(self, role: str, *, lr: float) -> None:
        group = self.by_role[role]
        wait_all(group.call("of_worker", "adjust", {"role": role, "lr": lr}), group.name)

    def follow(self, role: str) -> None:
        self._ask([self.by_role[role]], "follow", role=role)

    def update(self, batch: Batch, *, sampled_now: bool) -> Update:
        """Trains on one optimizer batch in every group that trains; the losses of each are divided by counts over the whole
        batch.
        """
        with self.still:
            self.ahead = True
        return self._step("update", batch, sampled_now=sampled_now)

    def forward_backward(self, batch: Batch, *, sampled_now: bool, last: bool, plugins: Sequence[PluginSpec] = ()) -> Update:
        return self._step("forward_backward", batch, sampled_now=sampled_now, last=last, plugins=plugins)

    def optim_step(self) -> Update:
        with self.still:
            self.ahead = True
        return self._step("optim_step")

    def gradients(self, patterns: Sequence[str]) -> dict[str, Tensor]:
        answers = self._ask(self.trained, "gradients", patterns=patterns)
        return {name: gradient for own in answers for name, gradient in own.items()}

    def evaluate(self, batch: Batch) -> Metrics:
        metrics = Metrics()
        for share in self._ask([self.by_role["actor"]], "evaluate", batch):
            metrics.join(share)
        return metrics

    def _step(self, method: str, batch: Batch | None = None, **arguments: Any) -> Update:
        """Returns the joined answers of the groups that train."""
        whole, updates = Update(Metrics()), self._ask(self.trained, method, batch, **arguments)
        for update in updates:
            whole.metrics.join(update.metrics)
            whole.refused = whole.refused or update.refused
            whole.flops += update.flops
            whole.devices += update.devices
        whole.peak_flops = min((update.peak_flops for update in updates if update.devices), default=0.0)
        return whole

    def _ask(self, groups: Sequence[WorkerGroup], method: str, batch: Batch | None = None, **arguments: Any) -> list[Any]:
        """Returns the results of a method of ``Worker`` from all processes of groups that train, which work at the same time.

        Args:
            batch: its rows are distributed over the ranks of each group.
        """
        import ray

        if self.before is not None:
            self.before(True)
        if batch is None:
            references = [each for group in groups for each in group.call("of_worker", method, arguments)]
        else:
            whole, calls = ray.put(Denominators.of(batch)), dict[int, list[tuple[Any, ...]]]()
            for ranks in {group.ranks for group in groups}:
                rows_of_ranks, passes = self._deal(batch, ranks)
                updates = map(ray.put, make_shards(batch, rows_of_ranks, UPDATES))
                calls[ranks] = [(method, *parts, whole, arguments) for parts in zip(passes, updates, strict=True)]
            references = [each for group in groups for each in group.call_ranks("on_batch", calls[group.ranks])]
        answers = wait_all(references, *(group.name for group in groups for _ in group.actors))
        self.compute_s += max((seconds for _, seconds in answers), default=0.0)
        return [result for result, _ in answers]

    def _deal(self, batch: Batch, ranks: int) -> Dealt:
        """Returns each rank's rows, by their places in the batch, and a reference to the data for passes, shared by all passes
        over the same tokens.
        """
        import ray

        known, prompts, dealt = self._dealt.get(ranks, (None, None, None))
        if known is None or dealt is None or known() is not batch.completion_ids or prompts is not batch.prompt_ids:
            rows = deal_rows(batch, ranks, unit_rows=self.unit_rows, flops=self.flops)
            dealt = rows, [ray.put(shard) for shard in make_shards(batch, rows, PASSES)]
            self._dealt[ranks] = weakref.ref(batch.completion_ids), batch.prompt_ids, dealt
        return dealt


def wait_all(references: Sequence[Any], *names: str, within_s: float | None = None) -> list[Any]:
    """Returns all results, in order. Raises the first failure as soon as it is there: ranks that wait for a dead one never
    answer.

    Args:
        names: owner of each reference, for messages; a single name is used for all.
        within_s: maximum seconds to wait for the next of them; default: no limit.
    """
    import ray

    owners = dict(zip(references, names * len(references) if len(names) == 1 else names, strict=False))
    left, results = list(references), dict[Any, Any]()
    while left:
        done, _ = ray.wait(left, num_returns=1, timeout=within_s)
        if not done:
            raise RunError(
                f"a worker of {owners[left[0]]} has not started within {within_s:g} s: check that ray.runtime_env can be installed"
                " there, and Ray's own logs"
            )
        done, left = ray.wait(left, num_returns=len(left), timeout=0)  # whatever else has come
        for reference in done:
            try:
                results[reference] = ray.get(reference)
            except ray.exceptions.RayError as error:
                raise plain_error(error, f"a worker of {owners[reference]}") from error
    return [results[reference] for reference in references]


def plain_error(error: Exception, who: str) -> Exception:
    """Converts a failure in another process to an error of the project; a ``UserError`` or ``RunError`` stays as it was raised."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, UserError | RunError):
        return cause
    if cause is not None:
        return RunError(f"{who} failed: {type(cause).__name__}: {' '.join(str(cause).split())}")
    if type(error).__name__ == "ActorUnavailableError":
        return LostError(f"{who} is lost (its process or its machine does not answer)")
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no reason known"]
    # Where a process could not even be made, its own traceback follows, and the reason is the last line.
    no_process = any(word in lines[0] for word in ("creation task", "runtime environment", "runtime_env"))
    reason = lines[-1 if no_process else 0].rstrip(".")
    return LostError(f"{who} is lost ({type(error).__name__}: {reason})")
