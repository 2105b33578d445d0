"""A worker holds models and trains them, one optimizer step at a time."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import Tensor

from rlhf_host.backends.one_process import OneProcess
from rlhf_host.config.resolve import merge_needs
from rlhf_host.config.schema import TrainConfig
from rlhf_host.errors import RunError, blaming
from rlhf_host.models.flops import peak_flops
from rlhf_host.models.memory_plans import Plan
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.plugins.specs import PluginSpec
from rlhf_host.protocols import Backend, Ranks, ShowsGradients, Update
from rlhf_host.records.needs import AlgoNeeds, Needs
from rlhf_host.records.ragged import RaggedTensor, Rows
from rlhf_host.records.tensors import OF_ROWS, Batch, Metric, RoleOutput, TopK
from rlhf_host.spans import span
from rlhf_host.training.batching import evened, group_rows, plan_microbatches
from rlhf_host.training.corrections import say_unused
from rlhf_host.training.deferred_values import DeferredValues
from rlhf_host.training.reduction import Denominators, Metrics, Reducer
from rlhf_host.training.role import Role, on_device, rows_of, worker_rows
from rlhf_host.training.soft_updates import BUCKET_BYTES, follow
from rlhf_host.training.update import Accumulation, PassResult, ask


def place(whole: Tensor, rows: Sequence[int], part: Tensor) -> None:
    """Writes the values computed for these rows, which may be cut to a shorter ``T``."""
    if isinstance(whole, RaggedTensor):
        whole.put_rows(rows, part)
    elif part.dim() > 1:
        whole[rows, : part.shape[1]] = part
    else:
        whole[rows] = part


@dataclass(slots=True)
class Worker:
    """Holder of all roles of one process."""

    roles: Mapping[str, Role]
    hooks: PluginManager
    settings: TrainConfig
    needs: Needs
    ranks: Ranks = field(default_factory=OneProcess)
    compute_s: float = 0.0
    """Seconds spent in forward, backward and optimizer steps so far."""
    seed: int = 0
    """Seed of the run."""
    memory: Plan = nullcontext
    """Decides what the passes of updates keep."""
    _made: tuple[int, int] = (0, 0)
    """The step of the last update, and how many updates it has had."""
    _taken: set[str] = field(default_factory=set)
    """Plugins whose weights a loss term has taken."""
    _held: dict[str, PassResult] = field(default_factory=dict)
    """Role → results of the passes whose gradients wait for ``optim_step``."""

    def __post_init__(self) -> None:
        for name, role in reversed([*self.roles.items()]):  # a role that is another itself comes later, and has its passes
            role.passes.around = partial(self.hooks.around, "around_pass", role=name)

    @torch.no_grad()
    def outputs(self, role: str, what: RoleOutput, batch: Batch) -> Tensor:
        """Returns ``[B, T]`` (``OF_ROWS``: ``[B]``) float32 on the CPU, computed in the same micro-batches, layout and
        precision as training.
        """
        holder = self.roles[role]
        result = torch.zeros(len(batch)) if what in OF_ROWS else Rows.of(batch.completion_mask).zeros()

        def run(part: Batch) -> tuple[Tensor]:
            return (getattr(holder.passes.forward(**rows_of(part), outputs=frozenset({what})), what),)

        return self._fill(holder, batch, run, result)[0]

    @torch.no_grad()
    def topk(self, role: str, k: int, batch: Batch) -> TopK:
        """Returns the role's ``k`` likeliest tokens at every completion token, on the CPU."""
        holder, shape = self.roles[role], Rows.of(batch.completion_mask)
        results = shape.zeros(k), shape.zeros(k, dtype=torch.int64)
        return TopK(*self._fill(holder, batch, lambda part: holder.passes.topk(k, **rows_of(part)), *results))

    def _fill(self, role: Role, batch: Batch, run: Callable[[Batch], Sequence[Tensor]], *results: Tensor) -> tuple[Tensor, ...]:
        """Fills ``results`` with the values that ``run`` returns for the rows of each micro-batch."""
        with span(f"outputs {role.name}", self):
            for rows, part in self._micro_batches(role, batch, range(len(batch))):
                for result, values in zip(results, run(part), strict=True):
                    place(result, rows, values.to(result.dtype).cpu())
        return results

    def _micro_batches(self, role: Role, batch: Batch, some: Sequence[int]) -> Iterator[tuple[list[int], Batch]]:
        """Yields the micro-batches of these rows, on the CPU. If only other ranks have rows, runs a pass that is not counted."""
        for rows in self._plan(role, batch, some):
            if rows:
                yield rows, worker_rows(batch, rows)
            else:
                role.blank(batch.images is not None)

    def adjust(self, role: str, *, lr: float) -> None:
        """Sets another peak learning rate, from the next update on."""
        if (backend := self.roles[role].backend) is not None:
            backend.lr = lr

    def follow(self, role: str) -> None:
        """Moves the weights of a frozen role towards those of its source (``RoleNeed.follows``). Collective over ranks."""
        need = next(need for need in self.needs.roles if need.name == role)
        assert need.follows is not None
        assert need.source is not None
        backend = self.roles[need.source].backend
        assert backend is not None
        everywhere = {"everywhere": True} if self.roles[need.source].traits.everywhere else {}
        with span(f"follow {role}", self), blaming(self.roles[need.source].trainer, "weights"):
            follow(self.roles[role].passes.model, backend.weights(BUCKET_BYTES, **everywhere), need.follows.share)

    def update(
        self,
        batch: Batch,
        *,
        sampled_now: bool = True,
        whole: Denominators | None = None,
        rows: list[int] | None = None,
        learn: bool = True,
        hold: bool = False,
        last: bool = True,
    ) -> Update:
        """Trains on one optimizer batch: a step for every trainable role that has loss terms. Collective over ranks.

        Args:
            batch: this rank's rows of the optimizer batch, perhaps none, with advantages and masks.
            sampled_now: the weights are still those that sampled, so the sampler's mismatch can be measured.
            whole: counts that the loss is divided by; default: those of ``batch``.
            rows: positions of the rows of ``batch`` in the whole; default: it is the whole.
            learn: if False, computes only the actor's losses and metrics; loss terms are then means that can be combined with
                those of other batches. A role in its ``idle_steps`` has metrics alone.
            hold: the gradients are added to those that wait for ``optim_step``, and no step is taken.
            last: with ``hold``, no other batch comes before it.

        Returns:
            This rank's share of the metrics, from its first process. All ranks agree whether a step was refused.
        """
        update = Update(Metrics())
        whole = Denominators.of(batch) if whole is None else whole
        rows = list(range(len(batch))) if rows is None else rows
        # In a batch of a data set only rows with a token in the loss have loss terms.
        sampled = batch.advantages is not None
        trained = range(len(batch)) if sampled else batch.loss_mask.any(-1).nonzero().squeeze(-1).tolist()
        flops = 0.0
        if learn:
            self._made = batch.step, self._made[1] + 1 if self._made[0] == batch.step else 1
        idle = {need.name for need in self.needs.roles if learn and 0 < batch.step <= need.idle_steps}
        for role in self.roles.values():
            if role.backend is None or not (learn or role.name == "actor"):
                continue
            if self.hooks.has("batch_statistics"):
                self._statistics(role, batch, trained)
            backend = role.backend if learn and role.name not in idle else None
            accumulation = self._accumulation(role, backend, None if role.name in idle else whole, sampled_now)
            accumulation.last = last
            with torch.set_grad_enabled(backend is not None), nullcontext() if backend is None else self.memory(role):
                result = accumulation.run(batch, self._plan(role, batch, trained, inside=accumulation.whole), rows)
            self.compute_s += result.compute_s
            flops += result.flops
            if backend is not None and hold:
                result.ended = last
                self._hold(role, result, update)
            elif backend is not None:
                self._step(role, backend, result, update)
            else:
                self._measure(result, update)
            if update.refused:
                break
        if self.ranks.part:
            update.metrics = Metrics()
        elif math.isfinite(flops):
            device = next(role.passes.device for role in self.roles.values())
            update.flops, update.devices, update.peak_flops = flops, self.ranks.parts, peak_flops(device)
        return update

    def forward_backward(
        self,
        batch: Batch,
        *,
        sampled_now: bool,
        last: bool,
        plugins: Sequence[PluginSpec] = (),
        whole: Denominators | None = None,
        rows: list[int] | None = None,
    ) -> Update:
        """Adds the gradients of a batch to those that wait for ``optim_step``. Collective over ranks.

        Args:
            last: no other batch comes before the step.
            plugins: give the loss, in place of the run's.
            sampled_now: as for ``update``; ``whole`` and ``rows`` too.
        """
        hooks, needs = self.hooks, self.needs
        try:
            if plugins:
                self.hooks = PluginManager.from_specs(plugins)
                self.needs = replace(merge_needs(self.hooks), roles=needs.roles)
            return self.update(batch, sampled_now=sampled_now, whole=whole, rows=rows, hold=True, last=last)
        finally:
            if plugins:
                self.hooks.close()
            self.hooks, self.needs = hooks, needs

    def optim_step(self) -> Update:
        """Takes the step for which gradients are held, of every role that has some. Collective over ranks."""
        update, held, self._held = Update(Metrics()), self._held, {}
        for name, result in held.items():
            role = self.roles[name]
            assert role.backend is not None
            if update.refused:
                role.backend.discard()
                continue
            if not result.ended:  # the pass over one token, which adds 0, tells the backend
                role.backend.backward(role.blank(), True)
            self._step(role, role.backend, result, update)
        if self.ranks.part:
            update.metrics = Metrics()
        return update

    def gradients(self, patterns: Sequence[str]) -> dict[str, Tensor]:
        """Returns the gradients of the actor that wait for ``optim_step``, in float32 on the CPU, by the names of its weights,
        and drops all that wait. Collective over ranks; processes but the first return none.

        Args:
            patterns: of the names of weights whose gradients are returned; none: they are dropped alone.

        Raises ``RunError`` if the backend does not show them.
        """
        found: dict[str, Tensor] = {}
        try:
            if patterns and "actor" in self._held:
                role = self.roles["actor"]
                if not isinstance(role.backend, ShowsGradients):
                    raise RunError(f"{role.trainer} does not show gradients: use the backend torch")
                for name, gradient in role.backend.gradients():
                    if not self.ranks.process and any(fnmatchcase(name, pattern) for pattern in patterns):
                        found[name] = gradient.float().cpu()
        finally:
            self._drop()
        return found

    def _drop(self) -> None:
        """Drops all gradients, also of passes that were interrupted."""
        self._held = {}
        for backend in filter(None, [role.backend for role in self.roles.values()]):
            backend.discard()

    def _hold(self, role: Role, result: PassResult, update: Update) -> None:
        """Keeps the result for ``optim_step``. After a failure of any rank, which it raises, or a refusal, nothing waits."""
        reports = self.ranks.gather((None if result.failure is None else str(result.failure), result.refused))
        errors = [message for message, _ in reports if message is not None]
        update.refused = next((refused for _, refused in reports if refused), None)
        if errors or update.refused:
            self._drop()
            if errors:
                raise result.failure or RunError(errors[0])
            return
        update.metrics.join(result.metrics, role.prefix)
        if result.terms:
            update.metrics.add([Metric("loss", result.loss, reduce="sum")], role.prefix)
        self._held.setdefault(role.name, PassResult()).add(result)

    def _accumulation(self, role: Role, backend: Backend | None, whole: Denominators | None, sampled_now: bool) -> Accumulation:
        """Returns the object that computes the role's losses, with the outputs that plugins need of it."""
        own = [output.what for output in self.needs.outputs if not output.role]
        measured = ["entropy"] if role.name == "actor" else []
        others = [output.role for output in self.needs.outputs if output.what == "distribution" and output.top is None]
        wanted = [self.roles[name] for name in others if name in self.roles and not role.passes.head.scalar]
        return Accumulation(
            role=role,
            backend=backend,
            hooks=self.hooks,
            reducer=None if whole is None else Reducer(whole),
            outputs=frozenset({"logprobs", *measured, *own} | ({"logits"} if wanted else set())),
            entropy_grad="entropy" in own,
            whole=wanted,
            sampled_now=sampled_now,
            against_sampler=self.settings.old_logprobs == "sampler",
            seed=self._seed(role),
        )

    def _seed(self, role: Role) -> list[int]:
        """Returns the seed of an update's dropout. A run that was resumed has the one of a run that was not."""
        # Processes that hold one copy of the model in parts need the same values, and those with slices of a line others.
        process = self.ranks.rank if self.ranks.slices is None else self.ranks.process
        return [self.seed, *self._made, process, zlib.crc32(role.name.encode())]

    @torch.no_grad()
    def evaluate(self, batch: Batch, *, whole: Denominators | None = None, rows: list[int] | None = None) -> Metrics:
        """Returns the metrics of ``update`` without taking a step."""
        return self.update(batch, sampled_now=False, whole=whole, rows=rows, learn=False).metrics

    def _measure(self, result: PassResult, update: Update) -> None:
        """Adds the metrics to ``update`` without learning. Raises the failure of any rank."""
        reports = self.ranks.gather((None if result.failure is None else str(result.failure), result.counts))
        if errors := [message for message, _ in reports if message is not None]:
            raise result.failure or RunError(errors[0])
        for name, count in {name: count for _, counts in reports for name, count in counts.items()}.items():
            result.metrics.as_mean(f"loss/{name}", count, first=self.ranks.rank == 0)
        update.metrics.join(result.metrics)

    def _step(self, role: Role, backend: Backend, result: PassResult, update: Update) -> None:
        """Takes the optimizer's step if the ranks agree on one."""
        own_error = None if result.failure is None else str(result.failure)
        reports = self.ranks.gather((own_error, result.refused, result.terms, result.corrections, result.taken))
        update.metrics.join(result.metrics, role.prefix)
        messages, refusals, terms, corrections, taken = zip(*reports, strict=True)
        errors = [message for message in messages if message is not None]
        update.refused = next(filter(None, refusals), None)
        self._taken.update(*taken)
        if given := set().union(*corrections):
            unused = given - self._taken
            update.metrics.add([Metric("correction/unused", len(unused), reduce="min")], role.prefix)
            say_unused(", ".join(sorted(unused)))
        if errors or update.refused or not any(terms):
            backend.discard()  # without terms: what passes that kept ranks even have left
            if errors:
                raise result.failure or RunError(errors[0])
            return
        with span(f"optimizer {role.name}", self), blaming(role.trainer, "step"):
            step = backend.step()
        if not step.applied:
            update.refused = f"{role.name}: the gradient norm is {step.grad_norm}"
            return
        metrics = [Metric("loss", result.loss, reduce="sum"), Metric("grad_norm", step.grad_norm), Metric("lr", step.lr)]
        if role.settings is not None and role.settings.gradient_checkpointing == "auto":
            metrics.append(Metric("recomputed_layers", role.passes.recomputed[0]))
        update.metrics.add(metrics, role.prefix)

    @torch.no_grad()
    def _statistics(self, role: Role, batch: Batch, in_loss: Sequence[int]) -> None:
        metrics, readings = Metrics(), DeferredValues()
        failure: Exception | None = None
        others = sorted({*range(len(batch))}.difference(in_loss))
        # Rows that do not train are there for their statistics. Ranks must agree: one may have none of them.
        apart = any(self.ranks.gather(bool(others)))
        for _, part in self._micro_batches(role, batch, others if apart else range(len(batch))):
            with span(f"statistics {role.name}", self):
                outputs = role.passes.forward(**rows_of(part), outputs=frozenset({"logprobs"}))
            if failure is not None:
                continue
            try:
                there = on_device(part, role.passes.device)
                for key, item in ask(self.hooks, "batch_statistics", there, role=role.name, outputs=outputs):
                    with blaming(key, "batch_statistics"):
                        assert isinstance(item, Metric)
                        metrics.add([item], role.prefix, readings=readings)
            except Exception as error:
                failure = error
        try:
            readings.read()
        except Exception as error:
            failure = failure or error
        reports = self.ranks.gather((None if failure is None else str(failure), metrics))
        if errors := [message for message, _ in reports if message is not None]:
            raise failure or RunError(errors[0])
        total = Metrics()
        for _, share in reports[:: self.ranks.parts]:
            total.join(share)
        batch.stats = {**batch.stats, **total.result()}

    def _plan(self, role: Role, batch: Batch, some: Sequence[int], inside: Sequence[Role] = ()) -> list[list[int]]:
        """Returns micro-batches of ``some`` rows. If every rank must run equally many passes, ranks with fewer rows get empty
        ones. Passes choose layouts for the longest row, then of all ranks.

        Args:
            inside: roles whose passes run inside this one's, where ranks cannot agree on the longest row any more.
        """
        groups = batch.group_id.tolist()
        read = [(role.passes, batch), *((each.passes, batch.seen_by(each.name)) for each in inside)]
        sizes = [(seen.prompt_ids, seen.lengths.tolist()) for _, seen in read]
        lengths = [[len(prompt) + length for prompt, length in zip(*each, strict=True)] for each in sizes]
        for (passes, _), each in zip(read, lengths, strict=True):
            longest = max((each[row] for row in some), default=1)
            passes.prepare(max(self.ranks.gather(longest)) if role.traits.even_passes else longest, batch.images is not None)

        def of(rows: list[int], number: int = 0) -> tuple[list[Sequence[int]], list[int], list[int]]:
            prompts, completions = sizes[number]
            return [prompts[i] for i in rows], [completions[i] for i in rows], [groups[i] for i in rows]

        def cost(rows: list[int]) -> int:
            return max(passes.cost(*of(rows, n)) for n, (passes, seen) in enumerate(read) if not n or seen is not batch)

        def tokens(rows: list[int]) -> int:
            return role.passes.tokens(*of(rows))

        together = AlgoNeeds.of(self.needs).unit_rows
        names = batch.unit_id.tolist() if together else groups
        units = [[some[place] for place in unit] for unit in group_rows([names[row] for row in some])]
        if role.passes.one_by_one and not together:
            plan = units = [[row] for row in some]
        else:
            plan = plan_microbatches(
                units, lengths[0], self.settings.max_tokens_per_microbatch, cost, tokens if together else None
            )
        if not role.traits.even_passes:
            return plan
        count = max(self.ranks.gather(len(plan)))

        def work(rows: list[int]) -> float:
            # By tokens where the model's operations are unknown: all ranks have the same model.
            return flops if math.isfinite(flops := role.passes.flops(*of(rows))) else float(tokens(rows))

        return evened(plan, count, units, self.settings.max_tokens_per_microbatch, cost, work)
