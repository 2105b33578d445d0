"""A model with its job, and the rows that its passes and hooks see."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor

from rlhf_host.config.schema import RoleConfig, TrainConfig
from rlhf_host.errors import blaming
from rlhf_host.models.balance import balance_of
from rlhf_host.models.masters import autocast_of
from rlhf_host.models.passes import Passes
from rlhf_host.protocols import Backend, BackendPlugin, BackendStart, BackendTraits, Kernels, Ranks, ShardedModel, SplitsFrozen
from rlhf_host.records.ragged import padded
from rlhf_host.records.tensors import Batch, Outputs


@dataclass(slots=True)
class Role:
    """A model with its job; ``backend`` is set if it is trained."""

    name: str
    passes: Passes
    backend: Backend | None = None
    traits: BackendTraits = dataclasses.field(default_factory=BackendTraits)
    trainer: str = "the backend"
    """Name of the backend, for its errors."""
    plugin: BackendPlugin | None = None
    settings: RoleConfig | None = None

    @classmethod
    def of(
        cls,
        name: str,
        model: Any,
        train: TrainConfig,
        *,
        kernels: Kernels | None = None,
        backend: BackendPlugin | None = None,
        settings: RoleConfig | None = None,
        total_updates: int = 0,
        ranks: Ranks | None = None,
        trainer: str = "the backend",
        pieces: ShardedModel | None = None,
        trainable: bool = True,
        rounds: Literal["yes", "with masters", "no"] = "yes",
    ) -> Role:
        """Returns a role around a loaded model.

        Args:
            pieces: the model has no weights; the backend reads them.
            backend: trains it, or splits it if it is not ``trainable``; uses ``settings``, ``total_updates`` and ``ranks``.
            rounds: weights without a backend are rounded where passes compute in 16 bits, and may all keep masters.
        """
        probe = None if pieces is None else pieces.probe
        device = next((model if probe is None else probe).parameters()).device
        traits = BackendTraits() if backend is None else backend.traits
        whole = pieces is None and (traits.masters and trainable if backend else rounds != "no")
        autocast = autocast_of(model, train.autocast, device, rounds=whole, keep_all=rounds == "with masters")
        # Kernels' twins need not give what routers say.
        balance = (
            None if backend is None or settings is None or not trainable else balance_of(model, settings.router_aux_loss_coef)
        )
        if (slices := None if ranks is None else ranks.slices) is not None:
            slices.refuse(model.config.get_text_config(), routed=balance is not None)
        passes = Passes(
            model,
            kernels=None if balance is not None else kernels,
            shared_prefix=train.shared_prefix,
            autocast=autocast,
            even_passes=traits.even_passes,
            balance=balance,
            slices=slices,
            probe=probe,
        )
        passes.keep_logits = train.keep_logits == "on"
        if pieces is not None:
            probe = pieces.probe = None  # its memory is for the weights
        if backend is None:
            return cls(name, passes)
        assert settings is not None
        assert ranks is not None
        start = BackendStart(
            model=model,
            compute=passes.compute,
            head=passes.head.parameters,
            role=settings,
            total_updates=total_updates,
            ranks=ranks,
            weights=None if pieces is None else pieces.weights,
            device=device,
        )
        if not trainable:
            with blaming(trainer, "split"):
                passes.go_through(cast(SplitsFrozen, backend).split(start), ranks)
            return cls(name, passes, traits=traits)
        with blaming(trainer, "start"):
            started = backend.start(start)
        if traits.even_passes or traits.sharded:
            passes.go_through(started, ranks)
        return cls(name, passes, started, traits, trainer, backend, settings)

    def itself(self, name: str) -> Role:
        """Returns a role that computes with this one's model as it is now, and is trained with it."""
        return Role(name, self.passes, traits=self.traits)

    def under(self, name: str, adapter: str | None) -> Role:
        """Returns a frozen role that computes with this one's model, under another adapter of it, or under none."""
        return Role(name, self.passes.under(adapter), traits=self.traits)

    @property
    def prefix(self) -> str:
        """Prefix of its metrics' names."""
        return "" if self.name == "actor" else f"{self.name}/"

    def blank(self, pictured: bool = False) -> Tensor:
        """Runs a forward pass over one token that is not counted; returns a loss of 0 that reaches every parameter.

        Args:
            pictured: the tower runs too, because other ranks have pictures.
        """
        ids, mask = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1, dtype=torch.bool)
        images = [()] if pictured else None
        return zero_loss(self.passes.forward([[0]], ids, mask, outputs=frozenset({"logprobs", "values"}), images=images))


def rows_of(batch: Batch) -> dict[str, Any]:
    """Returns the part of a batch that a pass uses."""
    names = ("prompt_ids", "completion_ids", "completion_mask", "group_id", "temperature", "images", "traces")
    return {name: getattr(batch, name) for name in names}


def zero_loss(outputs: Outputs) -> Tensor:
    """Returns a loss of 0 with a gradient of zeros."""
    every = (outputs.logprobs, outputs.values, outputs.scores, outputs.bootstrap, outputs.token_scores)
    values = next(item for item in every if item is not None)
    return torch.where(torch.isfinite(values), values, 0.0).sum() * 0.0


def worker_rows(batch: Batch, rows: Sequence[int]) -> Batch:
    """Returns the rows as worker hooks see them, padded, without the fields that only the controller has; where the batch is."""
    return batch.batch().select(rows).map(lambda _, value: padded(value))


def on_device(part: Batch, device: torch.device) -> Batch:
    """Returns the rows on a device. Passes take them from the CPU, where layouts are made."""

    def move(_: str, value: Any) -> Any:
        return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value

    return part.map(move)
