"""A worker holds models and trains them: micro-batches, hooks, exact reduction, one optimizer step at a time."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlhf_host.backends.protocol import Backend
from rlhf_host.backends.ranks import Ranks
from rlhf_host.config.schema import TrainConfig
from rlhf_host.errors import RunError
from rlhf_host.functional.kl import kl_estimate
from rlhf_host.models.forward import forward, row_cost
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.records.needs import Needs
from rlhf_host.records.tensors import Experience, LossTerm, Metric, Outputs
from rlhf_host.training.batching import deal, group_rows, plan_microbatches
from rlhf_host.training.reduction import Denominators, Metrics, Reducer
from rlhf_host.training.replicas import Plan, Replicas, replica_count


@dataclass(slots=True)
class Role:
    """A model with its job; ``backend`` is there when it is trained."""

    name: str
    model: Any
    backend: Backend | None = None

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device


@dataclass(slots=True)
class Update:
    """One optimizer batch's outcome; ``refused`` says why a role's step did not happen."""

    metrics: Metrics
    refused: str | None = None


@dataclass(slots=True)
class Share:
    """What one replica made of its part of an optimizer batch."""

    metrics: Metrics
    loss: float = 0.0
    terms: int = 0
    refused: str | None = None
    compute_s: float = 0.0


class _Deferred(Exception):
    """A failure outside of the passes that ranks make together, kept until they were over."""

    def __init__(self, error: Exception):
        super().__init__(str(error))
        self.error = error


@dataclass(slots=True)
class Worker:
    """All roles of one process."""

    roles: dict[str, Role]
    hooks: PluginManager
    settings: TrainConfig
    needs: Needs
    ranks: Ranks = field(default_factory=Ranks)
    compute_s: float = 0.0
    """Seconds spent in forward, backward and optimizer steps so far."""
    _autocast: dict[str, torch.dtype | None] = field(default_factory=dict)
    _teams: dict[str, Replicas] = field(default_factory=dict)

    # --- without gradient -------------------------------------------------------------------------

    def logprobs(self, role: str, experience: Experience) -> Tensor:
        """``[B, T]`` float32 on the CPU, in the same micro-batches, layout and precision as training."""
        return self._gather(role, experience, "logprobs")

    def values(self, role: str, experience: Experience) -> Tensor:
        """``[B, T]`` float32: the scalar head at the position that predicts token t."""
        return self._gather(role, experience, "values")

    def scores(self, role: str, experience: Experience) -> Tensor:
        """``[B]`` float32: the scalar head at the last token."""
        return self._gather(role, experience, "scores")

    def _gather(self, name: str, experience: Experience, what: str) -> Tensor:
        role = self.roles[name]
        width = experience.completion_ids.shape[1]
        result = torch.zeros((len(experience),) if what == "scores" else (len(experience), width))

        @torch.no_grad()
        def fill(model: Any, plan: Plan) -> None:
            for rows in plan:
                if not rows:
                    self._blank(role, model)
                    continue
                outputs = self._forward(role, _to_device(experience.select(rows), role.device), frozenset({what}), model)
                part = getattr(outputs, what).float().cpu()
                if what == "scores":
                    result[rows] = part
                else:
                    result[rows, : part.shape[1]] = part

        started = time.perf_counter()
        team = self._team(role)
        team.run(fill, self._shards(role, experience, len(team)))
        self.compute_s += time.perf_counter() - started
        return result

    # --- training ---------------------------------------------------------------------------------

    def update(
        self, batch: Experience, *, first: bool = True, whole: Denominators | None = None, rows: list[int] | None = None
    ) -> Update:
        """One optimizer batch: a step for every trainable role that has loss terms. Collective over ranks.

        Args:
            batch: this rank's rows of the optimizer batch, perhaps none; advantages and masks are there.
            first: the weights are still those that sampled, so the sampler's mismatch can be measured.
            whole: what the loss is divided by; default: this is the whole batch.
            rows: where the rows of ``batch`` are in the whole; default: they are all of it.

        Returns:
            This rank's share of the metrics, from its first process; whether a step was refused is agreed between ranks.
        """
        update = Update(Metrics())
        whole = Denominators.of(batch) if whole is None else whole
        rows = list(range(len(batch))) if rows is None else rows
        for role in self.roles.values():
            if role.backend is not None:
                self._statistics(role, batch)
                self._train(role, batch, first, Reducer(whole), rows, update)
            if update.refused:
                break
        if self.ranks.part:
            update.metrics = Metrics()
        return update

    def _train(self, role: Role, batch: Experience, first: bool, reducer: Reducer, places: list[int], update: Update) -> None:
        assert role.backend is not None
        prefix = "" if role.name == "actor" else f"{role.name}/"
        team = self._team(role)
        shards = self._shards(role, batch, len(team))
        failure: Exception | None = None
        parts: list[Share] = []
        try:
            parts = team.run(lambda model, plan: self._accumulate(role, model, batch, plan, reducer, places, first), shards)
        except _Deferred as deferred:
            failure = deferred.error
        except Exception as error:
            # Where passes are collective, the others wait in one: they hear of it by this process's end, not by an agreement.
            if role.backend.even_passes:
                raise
            failure = error
        refused = next((part.refused for part in parts if part.refused), None)
        said = self.ranks.gather((None if failure is None else str(failure), refused, any(part.terms for part in parts)))
        self.compute_s += max((part.compute_s for part in parts), default=0.0)
        for part in parts:
            update.metrics.join(part.metrics, prefix)
        errors = [error for error, _, _ in said if error is not None]
        update.refused = next((reason for _, reason, _ in said if reason), None)
        if errors or update.refused:
            team.discard()
            role.backend.discard()
            if failure is not None:
                raise failure
            if errors:
                raise RunError(errors[0])
            return
        if not any(terms for _, _, terms in said):
            role.backend.discard()  # what passes that kept ranks even have left
            return
        started = time.perf_counter()
        team.collect()
        result = role.backend.step()
        self.compute_s += time.perf_counter() - started
        if not result.applied:
            update.refused = f"{role.name}: the gradient norm is {result.grad_norm}"
            return
        shared = {"grad_norm": result.grad_norm, "lr": result.lr}
        update.metrics.add([Metric("loss", sum(part.loss for part in parts), reduce="sum")], prefix)
        update.metrics.add((Metric(name, value) for name, value in shared.items()), prefix)

    def _accumulate(
        self, role: Role, model: Any, batch: Experience, plan: Plan, reducer: Reducer, places: list[int], first: bool
    ) -> Share:
        """Forward and backward passes over micro-batches; the gradients stay in ``model``."""
        assert role.backend is not None
        share = Share(Metrics())
        outputs_needed = frozenset({"logprobs", "entropy"} | {name for name in self.needs.outputs if "." not in name})
        even = role.backend.even_passes
        failure: Exception | None = None
        for number, rows in enumerate(plan):
            last = number == len(plan) - 1
            started = time.perf_counter()
            if not rows:
                role.backend.backward(self._blank(role, model), last)
                share.compute_s += time.perf_counter() - started
                continue
            part = _to_device(_part(batch, rows), role.device)
            started = time.perf_counter()
            outputs = self._forward(role, part, outputs_needed, model)
            loss: Tensor | None = None
            try:
                if failure is None:
                    loss = self._loss(role, outputs, part, reducer, [places[row] for row in rows], first, share)
            except Exception as error:
                if not even:
                    raise
                failure = error  # raised once the passes are over that other ranks wait in
            if loss is None and even:
                loss = _nothing(outputs)
            if loss is not None:
                value = float(loss.detach())
                if not math.isfinite(value):
                    share.refused = f"{role.name}: the loss is {value}"
                    if not even:
                        return share
                    loss = _nothing(outputs)
                share.loss += value
                role.backend.backward(loss, last)
            share.compute_s += time.perf_counter() - started
        if failure is not None:
            raise _Deferred(failure)
        return share

    def _loss(
        self, role: Role, outputs: Outputs, part: Experience, reducer: Reducer, places: list[int], first: bool, share: Share
    ) -> Tensor | None:
        """A micro-batch's share of the loss, by the plugins; what else they say goes to ``share``."""
        items = _flat(self.hooks.each("compute_loss", role=role.name, outputs=outputs, batch=part))
        corrections = self._corrections(outputs, part)
        loss: Tensor | None = None
        for key, item in items:
            if isinstance(item, Metric):
                share.metrics.add([item])
                continue
            try:
                reduced = reducer.reduce(item, places, corrections)
            except ValueError as error:
                raise RunError(f"{key}: {error}") from error
            share.metrics.add([Metric(f"loss/{item.name}", reduced.detach(), reduce="sum")])
            loss = reduced if loss is None else loss + reduced
            share.terms += 1
        if role.name == "actor" and outputs.logprobs is not None:
            share.metrics.add(self._actor_metrics(outputs, part, corrections, first))
        return loss

    @torch.no_grad()
    def _statistics(self, role: Role, batch: Experience) -> None:
        if not self.hooks.has("batch_statistics"):
            return
        prefix = "" if role.name == "actor" else f"{role.name}/"
        found = Metrics()
        failure: Exception | None = None
        for rows in self._shards(role, batch, 1)[0]:
            if not rows:
                self._blank(role, role.model)
                continue
            part = _to_device(_part(batch, rows), role.device)
            started = time.perf_counter()
            outputs = self._forward(role, part, frozenset({"logprobs"}))
            self.compute_s += time.perf_counter() - started
            if failure is not None:
                continue
            try:
                items = _flat(self.hooks.each("batch_statistics", role=role.name, outputs=outputs, batch=part))
                found.add((item for _, item in items if isinstance(item, Metric)), prefix)
            except Exception as error:
                failure = error
        said = self.ranks.gather((None if failure is None else str(failure), found))
        if failure is not None:
            raise failure
        total = Metrics()
        for error_elsewhere, _ in said:
            if error_elsewhere is not None:
                raise RunError(error_elsewhere)
        for _, share in said[:: self.ranks.parts]:
            total.join(share)
        batch.stats = {**batch.stats, **total.result()}

    @torch.no_grad()
    def _corrections(self, outputs: Outputs, batch: Experience) -> Tensor | None:
        """Sampler-to-trainer weights ``[b, t]``, multiplied over plugins; ``None`` when no plugin asks for any."""
        if outputs.logprobs is None or batch.advantages is None or not self.hooks.has("importance_weights"):
            return None
        gates_only = self.settings.old_logprobs == "sampler"
        current, mask = outputs.logprobs.detach(), batch.action_mask
        logprobs = current if batch.old_logprobs is None or gates_only else batch.old_logprobs
        found = self.hooks.each(
            "importance_weights",
            logprobs=logprobs,
            sampler_logprobs=batch.sampler_logprobs,
            current_logprobs=current,
            advantages=batch.advantages,
            mask=mask,
        )
        weights = torch.ones_like(current)
        for key, weight in found:
            if not isinstance(weight, Tensor) or weight.shape != mask.shape:
                given = list(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
                raise RunError(f"{key} gave {given} from importance_weights, expected a tensor {list(mask.shape)}")
            # With the ratio taken against the sampler the weight is in it already: only its zeros may act.
            weight = weight != 0 if gates_only else weight
            # What the plugin left in masked places would reach the gradient as 0·NaN.
            weights = weights * torch.where(mask, weight.to(weights.dtype), 1.0)
        return weights

    @torch.no_grad()
    def _actor_metrics(self, outputs: Outputs, batch: Experience, corrections: Tensor | None, first: bool) -> Iterable[Metric]:
        assert outputs.logprobs is not None
        mask = batch.action_mask
        logprobs = outputs.logprobs.detach()
        trainer = batch.old_logprobs if self.settings.old_logprobs != "sampler" and batch.old_logprobs is not None else logprobs
        metrics = []
        if first:
            gap = torch.where(mask, trainer - batch.sampler_logprobs, 0.0)
            metrics += [
                Metric("mismatch/mean", gap.abs(), mask),
                Metric("mismatch/max", gap.abs(), mask, reduce="max"),
                Metric("mismatch/k3", kl_estimate(batch.sampler_logprobs, trainer, mask, "k3"), mask),
            ]
        if batch.old_logprobs is not None:
            metrics += [
                Metric("kl/update", kl_estimate(batch.old_logprobs, logprobs, mask, "k3"), mask),
                Metric("ratio/max_log", torch.where(mask, logprobs - batch.old_logprobs, 0.0).abs(), mask, reduce="max"),
            ]
        if outputs.entropy is not None:
            metrics.append(Metric("entropy", outputs.entropy.detach(), mask))
        if corrections is not None:
            metrics += [
                Metric("correction/mean", corrections, batch.loss_mask),
                Metric("correction/max", corrections, batch.loss_mask, reduce="max"),
                Metric("correction/zeroed", (corrections == 0).float(), batch.loss_mask),
                Metric("correction/ess", corrections, batch.loss_mask, reduce="ess"),
            ]
        return metrics

    # --- shared -----------------------------------------------------------------------------------

    def _forward(self, role: Role, batch: Experience, outputs: frozenset[str], model: Any = None) -> Outputs:
        return forward(
            role.model if model is None else model,
            batch.prompt_ids,
            batch.completion_ids,
            batch.completion_mask,
            batch.group_id,
            temperature=batch.temperature,
            outputs=outputs,
            shared_prefix=self.settings.shared_prefix,
            entropy_grad="entropy" in self.needs.outputs,
            autocast_dtype=self._precision(role),
        )

    def _shards(self, role: Role, batch: Experience, count: int) -> list[Plan]:
        """Micro-batches for each of ``count`` replicas, of about equally many tokens; there may be none for some.

        Where every rank must run equally many passes, those with fewer get empty ones.
        """
        prompts, completions = batch.prompt_ids, batch.lengths.tolist()
        groups = batch.group_id.tolist()
        together = self.needs.unit_rows

        def cost(rows: list[int]) -> int:
            return row_cost(
                role.model,
                [prompts[i] for i in rows],
                [completions[i] for i in rows],
                [groups[i] for i in rows],
                shared_prefix=self.settings.shared_prefix,
            )

        units = group_rows(batch.unit_id.tolist() if together else groups)
        lengths = [len(prompt) + completion for prompt, completion in zip(prompts, completions, strict=True)]
        # A unit's prompts are mostly one, which is computed once.
        sizes = [sum(completions[i] for i in unit) + max(len(prompts[i]) for i in unit) for unit in units]
        # Replicas hold their activations at the same time, so the budget is theirs together.
        budget = self.settings.max_tokens_per_microbatch // (1 if together else count)
        plans = [plan_microbatches(part, lengths, budget, cost, together) for part in deal(units, sizes, count)]
        if role.backend is not None and role.backend.even_passes:
            plans[0] += [[]] * (self.ranks.largest(len(plans[0])) - len(plans[0]))
        return plans

    def _blank(self, role: Role, model: Any) -> Tensor:
        """A forward pass over one token that counts nowhere; a loss of 0 that reaches every parameter of it."""
        ids, mask = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1, dtype=torch.bool)
        outputs = forward(
            model, [[0]], ids, mask, outputs=frozenset({"logprobs", "values"}), autocast_dtype=self._precision(role)
        )
        return _nothing(outputs)

    def _team(self, role: Role) -> Replicas:
        if role.name not in self._teams:
            even = role.backend is not None and role.backend.even_passes
            count = 1 if even else replica_count(role.model, self.settings.replicas)
            self._teams[role.name] = Replicas(role.model, count)
        return self._teams[role.name]

    def _precision(self, role: Role) -> torch.dtype | None:
        if role.name not in self._autocast:
            wanted = self.settings.autocast
            capable = role.device.type == "cuda" and torch.cuda.is_bf16_supported()
            self._autocast[role.name] = torch.bfloat16 if wanted == "bfloat16" or (wanted == "auto" and capable) else None
        return self._autocast[role.name]


def _flat(found: Iterable[tuple[str, Any]]) -> list[tuple[str, LossTerm | Metric]]:
    items: list[tuple[str, LossTerm | Metric]] = []
    for key, result in found:
        try:
            given = list(result)  # a generator's body runs here, out of the manager's sight
        except Exception as error:
            raise RunError(f"{key} failed in a loss hook: {type(error).__name__}: {error}") from error
        for item in given:
            if not isinstance(item, LossTerm | Metric):
                raise RunError(f"{key} returned a {type(item).__name__}; a loss hook gives LossTerm and Metric")
            items.append((key, item))
    return items


def _nothing(outputs: Outputs) -> Tensor:
    """A loss of 0 with a gradient of zeros."""
    found = next(item for item in (outputs.logprobs, outputs.values, outputs.scores) if item is not None)
    return torch.where(torch.isfinite(found), found, 0.0).sum() * 0.0


def _part(batch: Experience, rows: list[int]) -> Experience:
    """The rows as worker hooks see them: without the records, which other processes do not have."""
    part = batch.select(rows)
    part.trajectories = []
    return part


def _to_device(batch: Experience, device: torch.device) -> Experience:
    if device.type == "cpu":
        return batch

    def move(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: move(item) for name, item in value.items()}
        return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value

    return Experience(**{f.name: move(getattr(batch, f.name)) for f in dataclasses.fields(batch)})
