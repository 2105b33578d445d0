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
from rlhf_host.config.schema import TrainConfig
from rlhf_host.errors import RunError
from rlhf_host.functional.kl import kl_estimate
from rlhf_host.models.forward import forward, row_cost
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.training.batching import group_rows, plan_microbatches
from rlhf_host.training.reduction import Metrics, Reducer
from rlhf_host.types import Experience, LossTerm, Metric, Needs, Outputs


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
class Worker:
    """All roles of one process."""

    roles: dict[str, Role]
    hooks: PluginManager
    settings: TrainConfig
    needs: Needs
    compute_s: float = 0.0
    """Seconds spent in forward, backward and optimizer steps so far."""
    _autocast: dict[str, torch.dtype | None] = field(default_factory=dict)

    # --- without gradient -------------------------------------------------------------------------

    @torch.no_grad()
    def logprobs(self, role: str, experience: Experience) -> Tensor:
        """``[B, T]`` float32 on the CPU, in the same micro-batches, layout and precision as training."""
        return self._gather(role, experience, "logprobs")

    @torch.no_grad()
    def values(self, role: str, experience: Experience) -> Tensor:
        """``[B, T]`` float32: the scalar head at the position that predicts token t."""
        return self._gather(role, experience, "values")

    @torch.no_grad()
    def scores(self, role: str, experience: Experience) -> Tensor:
        """``[B]`` float32: the scalar head at the last token."""
        return self._gather(role, experience, "scores")

    def _gather(self, name: str, experience: Experience, what: str) -> Tensor:
        role = self.roles[name]
        width = experience.completion_ids.shape[1]
        result = torch.zeros((len(experience),) if what == "scores" else (len(experience), width))
        for rows in self._plan(role, experience):
            part = getattr(self._forward(role, experience.select(rows), frozenset({what})), what).float().cpu()
            if what == "scores":
                result[rows] = part
            else:
                result[rows, : part.shape[1]] = part
        return result

    # --- training ---------------------------------------------------------------------------------

    def update(self, batch: Experience, *, first: bool = True) -> Update:
        """One optimizer batch: a step for every trainable role that has loss terms.

        Args:
            batch: all rows of the optimizer batch; advantages and masks are there.
            first: the weights are still those that sampled, so the sampler's mismatch can be measured.
        """
        update = Update(Metrics())
        for role in self.roles.values():
            if role.backend is not None:
                self._statistics(role, batch)
                self._train(role, batch, first, update)
            if update.refused:
                break
        return update

    def _train(self, role: Role, batch: Experience, first: bool, update: Update) -> None:
        assert role.backend is not None
        reducer = Reducer(batch)
        prefix = "" if role.name == "actor" else f"{role.name}/"
        total, terms = 0.0, 0
        outputs_needed = frozenset({"logprobs", "entropy"} | {name for name in self.needs.outputs if "." not in name})
        for rows in self._plan(role, batch):
            part = _to_device(_part(batch, rows), role.device)
            outputs = self._forward(role, part, outputs_needed)
            started = time.perf_counter()
            items = _flat(self.hooks.each("compute_loss", role=role.name, outputs=outputs, batch=part))
            corrections = self._corrections(outputs, part)
            loss: Tensor | None = None
            for key, item in items:
                if isinstance(item, Metric):
                    update.metrics.add([item], prefix)
                    continue
                try:
                    share = reducer.reduce(item, rows, corrections)
                except ValueError as error:
                    raise RunError(f"{key}: {error}") from error
                update.metrics.add([Metric(f"loss/{item.name}", share.detach(), reduce="sum")], prefix)
                loss = share if loss is None else loss + share
                terms += 1
            if role.name == "actor" and outputs.logprobs is not None:
                update.metrics.add(self._actor_metrics(outputs, part, corrections, first))
            if loss is None:
                continue
            value = float(loss.detach())
            if not math.isfinite(value):
                role.backend.discard()
                update.refused = f"{role.name}: the loss is {value}"
                return
            total += value
            role.backend.backward(loss)
            self.compute_s += time.perf_counter() - started
        if not terms:
            return
        started = time.perf_counter()
        result = role.backend.step()
        self.compute_s += time.perf_counter() - started
        if not result.applied:
            update.refused = f"{role.name}: the gradient norm is {result.grad_norm}"
            return
        named = {"loss": total, "grad_norm": result.grad_norm, "lr": result.lr}
        update.metrics.add((Metric(name, value) for name, value in named.items()), prefix)

    @torch.no_grad()
    def _statistics(self, role: Role, batch: Experience) -> None:
        if not self.hooks.has("batch_statistics"):
            return
        found = Metrics()
        for rows in self._plan(role, batch):
            part = _to_device(_part(batch, rows), role.device)
            outputs = self._forward(role, part, frozenset({"logprobs"}))
            items = _flat(self.hooks.each("batch_statistics", role=role.name, outputs=outputs, batch=part))
            found.add((item for _, item in items if isinstance(item, Metric)), "" if role.name == "actor" else f"{role.name}/")
        batch.stats = {**batch.stats, **found.result()}

    @torch.no_grad()
    def _corrections(self, outputs: Outputs, batch: Experience) -> Tensor | None:
        """Sampler-to-trainer weights ``[b, t]``, multiplied over plugins; ``None`` when no plugin asks for any."""
        if outputs.logprobs is None or batch.advantages is None or not self.hooks.has("importance_weights"):
            return None
        gates_only = self.settings.old_logprobs == "sampler"
        fused = batch.old_logprobs is None or gates_only
        logprobs = outputs.logprobs.detach() if fused else batch.old_logprobs
        found = self.hooks.each(
            "importance_weights",
            logprobs=logprobs,
            sampler_logprobs=batch.sampler_logprobs,
            advantages=batch.advantages,
            mask=batch.action_mask,
        )
        weights = torch.ones_like(outputs.logprobs)
        for _, weight in found:
            # With the ratio taken against the sampler the weight is in it already: only its zeros may act.
            weights = weights * (weight != 0 if gates_only else weight)
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
                Metric("correction/mean", corrections, mask),
                Metric("correction/zeroed", (corrections == 0).float(), mask),
            ]
        return metrics

    # --- shared -----------------------------------------------------------------------------------

    def _forward(self, role: Role, batch: Experience, outputs: frozenset[str]) -> Outputs:
        started = time.perf_counter()
        try:
            return forward(
                role.model,
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
        finally:
            self.compute_s += time.perf_counter() - started

    def _plan(self, role: Role, batch: Experience) -> list[list[int]]:
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
        return plan_microbatches(units, lengths, self.settings.max_tokens_per_microbatch, cost, together)

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
