"""One role's part of an optimizer batch: forward and backward over micro-batches, hooks, exact reduction."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from rlhf_host.errors import RunError, UserError, blaming
from rlhf_host.models.adapter_dropout import drawing, dropping
from rlhf_host.models.memory_plans import out_of_memory
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.protocols import Backend
from rlhf_host.records.tensors import Batch, Distribution, LossTerm, Metric, Outputs
from rlhf_host.spans import span
from rlhf_host.training.actor_metrics import RESERVED, actor_metrics
from rlhf_host.training.corrections import correction_weights
from rlhf_host.training.deferred_values import DeferredValues
from rlhf_host.training.reduction import Metrics, Reducer
from rlhf_host.training.role import Role, on_device, rows_of, worker_rows, zero_loss


@dataclass(slots=True)
class PassResult:
    """Results of the passes over all micro-batches; the gradients are in the model."""

    metrics: Metrics = field(default_factory=Metrics)
    compute_s: float = 0.0
    flops: float = 0.0
    """FLOPs of the model (``Passes.flops``)."""
    loss: float = 0.0
    terms: int = 0
    refused: str | None = None
    failure: Exception | None = None
    """Failure of a hook, kept here if the passes had to go on because other ranks wait in them."""
    corrections: set[str] = field(default_factory=set)
    """Plugins that gave importance weights."""
    taken: set[str] = field(default_factory=set)
    """Plugins whose weights were applied to a loss term."""
    readings: DeferredValues = field(default_factory=DeferredValues)
    """Metrics, losses and checks of all micro-batches, read after the last."""
    counts: dict[str, int] = field(default_factory=dict)
    """Loss term → number of things it is the mean over."""
    ended: bool = False
    """The backend knows that a step follows."""

    def add(self, other: PassResult) -> None:
        """Adds the results of later passes before the same step, but for their metrics."""
        self.loss, self.terms, self.ended = self.loss + other.loss, self.terms + other.terms, other.ended
        self.corrections |= other.corrections
        self.taken |= other.taken


@dataclass(slots=True)
class Accumulation:
    """State that stays the same over the micro-batches of one role's update."""

    role: Role
    backend: Backend | None
    """None: nothing is learned from the passes."""
    hooks: PluginManager
    reducer: Reducer | None
    """None: loss terms do not count, because the role is idle."""
    outputs: frozenset[str]
    entropy_grad: bool
    whole: Sequence[Role]
    """Roles whose distribution over the whole vocabulary is needed."""
    sampled_now: bool
    against_sampler: bool
    """``old_logprobs`` are the sampler's."""
    seed: Sequence[int] = (0,)
    """Seed of the dropout at the inputs of adapters."""
    last: bool = True
    """A step follows these passes."""

    def run(self, batch: Batch, plan: Sequence[list[int]], places: Sequence[int]) -> PassResult:
        """Runs all passes.

        Args:
            batch: this rank's rows of the optimizer batch.
            plan: rows of each micro-batch; none if only other ranks have rows.
            places: positions of the rows of ``batch`` in the whole.
        """
        result = PassResult()
        with dropping(self.role.passes.model, self.role.passes.compute) as drops:
            self._all(batch, plan, places, result, drops)
        try:
            with span("losses", result):
                if result.failure is None:
                    result.readings.read()
        except Exception as error:
            result.failure = error
        return result

    def _all(self, batch: Batch, plan: Sequence[list[int]], places: Sequence[int], result: PassResult, drops: bool) -> None:
        """Runs all passes. ``drops``: adapters have dropout, whose values each pass draws anew."""
        try:
            for number, rows in enumerate(plan):
                part = worker_rows(batch, rows) if rows else None
                last = self.last and number == len(plan) - 1
                seed = [*self.seed, number] if drops and self.backend is not None else None
                with span(f"pass {self.role.name}", result):
                    if part is None:
                        with drawing(seed, self.role.passes.device):
                            blank = self.role.blank(batch.images is not None)
                        for other in self.whole:
                            if other.traits.even_passes:
                                with torch.no_grad():
                                    other.blank(batch.images is not None)
                        if self.backend is not None:
                            self.backend.backward(blank, last)
                    else:
                        self._pass(part, [places[row] for row in rows], result, last, seed)
                if part is not None:
                    result.flops += self.role.passes.flops(part.prompt_ids, part.lengths.tolist(), part.group_id.tolist())
        except Exception as error:
            failure = out_of_memory(self.role, error) if isinstance(error, torch.OutOfMemoryError) else error
            # Where passes are collective, the others wait in one: they hear of it by this process's end, not by an agreement.
            if self.role.traits.even_passes:
                raise failure from failure.__cause__
            result.failure = failure

    def _pass(self, rows: Batch, places: list[int], result: PassResult, last: bool, seed: Sequence[int] | None) -> None:
        """Runs one micro-batch, without waiting for its device.

        Args:
            rows: on the CPU.
            seed: of the dropout, if there is any.
        """
        passes = self.role.passes
        others = {} if passes.head.scalar else rows.distributions
        with span("forward"), drawing(seed, passes.device):
            outputs = passes.forward(**rows_of(rows), outputs=self.outputs, entropy_grad=self.entropy_grad, others=others)
        part = on_device(rows, passes.device)
        for other in self.whole:
            with torch.no_grad():
                theirs = other.passes.forward(**rows_of(rows.seen_by(other.name)), outputs=frozenset({"logits"})).logits
            outputs.others[other.name] = whole_distribution(theirs, outputs.logits, part, other.name)
        loss: Tensor | None = None
        try:
            if result.failure is None:
                loss = self._loss(outputs, part, places, result)
        except Exception as error:
            if not self.role.traits.even_passes:
                raise
            result.failure = error
        if self.backend is not None and (self.role.traits.even_passes if loss is None else not loss.requires_grad):
            loss = zero_loss(outputs)
        if loss is not None and self.backend is not None:
            with span("backward"):
                self.backend.backward(loss, last)

    def _loss(self, outputs: Outputs, part: Batch, places: list[int], result: PassResult) -> Tensor | None:
        """Returns a micro-batch's share of the loss, computed by the plugins; writes their metrics into ``result``."""
        readings = result.readings
        corrections = correction_weights(self.hooks, outputs, part, gates_only=self.against_sampler, readings=readings)
        if corrections is not None:
            result.corrections |= corrections.keys
        loss: Tensor | None = None
        parts: list[tuple[str, Tensor]] = []
        for key, item in ask(self.hooks, "compute_loss", part, role=self.role.name, outputs=outputs):
            with blaming(key, "compute_loss"):
                if isinstance(item, Metric):
                    result.metrics.add([item], readings=readings)
                if isinstance(item, Metric) or self.reducer is None:
                    continue
                reduced = self.reducer.reduce(item, places, corrections, self.hooks.by_key[key].alias)
                if self.backend is None:
                    result.counts[item.name] = self.reducer.count(item, self.hooks.by_key[key].alias)
            if self.backend is not None and not reduced.requires_grad:
                readings.take(reduced, partial(_refuse_constant, key, item.name))
            if corrections is not None and item.corrected:
                result.taken |= corrections.of(item.values)[1]
            result.metrics.add([Metric(f"loss/{item.name}", reduced.detach(), reduce="sum")], readings=readings)
            parts.append((f"{key}, {item.name!r}", reduced.detach()))
            loss = reduced if loss is None else loss + reduced
            result.terms += 1
        if outputs.router_loss is not None and self.backend is not None and loss is not None:
            loss = loss + self._router_term(outputs.router_loss, part, places, result)
        if self.role.name == "actor" and outputs.logprobs is not None:
            metrics = actor_metrics(
                outputs, part, corrections, sampled_now=self.sampled_now, against_sampler=self.against_sampler
            )
            result.metrics.add(metrics, readings=readings)
        if loss is not None:
            names, shares = zip(*parts, strict=True)
            readings.take(torch.stack([loss.detach(), *shares]), partial(self._count, result, names))
        return loss

    def _count(self, result: PassResult, names: Sequence[str], losses: list[float]) -> None:
        """Counts the loss of a micro-batch; refuses the update if it is not finite.

        Args:
            names: plugin and loss term of each share of the loss.
            losses: the loss, then these shares.
        """
        loss, *shares = losses
        result.loss += loss
        if not math.isfinite(loss) and result.refused is None:
            whose = "; ".join(name for name, share in zip(names, shares, strict=True) if not math.isfinite(share))
            result.refused = f"{self.role.name}: the loss is {loss}" + (f" (of {whose})" if whose else "")

    def _router_term(self, router_loss: Tensor, part: Batch, places: list[int], result: PassResult) -> Tensor:
        """Returns the routers' loss, weighted by the micro-batch's share of the tokens in the loss. It is the one term that
        depends on how a batch is split, because it is a mean of products of means.
        """
        assert self.role.passes.balance is not None
        assert self.reducer is not None
        values = router_loss.expand(part.loss_mask.shape)
        reduced = self.reducer.reduce(LossTerm("router", values, coefficient=self.role.passes.balance.coef), places, None)
        result.metrics.add([Metric("loss/router", reduced.detach(), reduce="sum")], readings=result.readings)
        return reduced


def _refuse_constant(key: str, term: str, share: list[float]) -> None:
    """Raises ``RunError`` for a loss term that has a value, and no gradient."""
    if share != [0.0]:
        raise RunError(f"{key}: loss term {term!r} has no gradient: make it of outputs, without detach and no_grad")


def whole_distribution(theirs: Tensor | None, own: Tensor | None, batch: Batch, role: str) -> Distribution:
    """Returns the distribution over the whole vocabulary, from logits ``[b, t, V]``, at the batch's temperature. Raises
    ``UserError`` for two different vocabularies, unless the role has its own tokens.
    """
    assert theirs is not None
    assert own is not None
    if theirs.shape != own.shape and role not in batch.rows:
        sizes = f"{theirs.shape[-1]} tokens, and this model one of {own.shape[-1]}"
        raise UserError(f"the other role has a vocabulary of {sizes}: give a model with the same tokens")
    logprobs, mine = (
        torch.where(rows.completion_mask.unsqueeze(-1), (logits / batch.temperature).log_softmax(-1), 0.0)
        for logits, rows in ((theirs, batch.seen_by(role)), (own, batch))
    )
    return Distribution(logprobs, mine)


def _to_show(outputs: Outputs, key: str) -> Outputs:
    """Returns the outputs as a plugin gets them. Entropy whose gradient nobody asked for may be measured; to train on it is an
    error, because it would teach nothing.
    """
    if outputs.entropy is None or outputs.entropy.requires_grad or not torch.is_grad_enabled():
        return outputs
    entropy = outputs.entropy.detach().requires_grad_()
    entropy.register_hook(partial(_refuse_unasked, key))
    return replace(outputs, entropy=entropy.clone())  # what is no leaf may be changed in place


def _refuse_unasked(key: str, gradient: Tensor) -> None:
    if bool(gradient.any()):
        raise RunError(
            f"{key} has a loss of outputs.entropy, which has a gradient only where a plugin needs it: add Output('entropy') to"
            " the outputs of its Needs"
        )


def ask(
    hooks: PluginManager, hook: str, batch: Batch, *, role: str, outputs: Outputs
) -> Iterator[tuple[str, LossTerm | Metric]]:
    """Calls the loss hooks of the plugins that train the role; returns their answers with the plugin's key. A plugin sees its
    own ``prepare_batch`` as ``batch.own``.

    Raises ``RunError`` for a metric whose name belongs to the host.
    """
    for key in hooks.names_for(hook, role):
        batch.own = batch.extra.get(hooks.by_key[key].alias, {})
        for item in hooks.call(key, hook, role=role, outputs=_to_show(outputs, key), batch=batch) or ():
            if isinstance(item, Metric) and (item.name in RESERVED or str(item.name).startswith("loss/")):
                raise RunError(f"{key} has a metric {item.name!r}, which is the host's own: give it another name")
            yield key, item
