"""The backend ``fsdp``: PyTorch's FSDP2, with the losses, clipping and schedule of ``torch``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, field_validator

from rlhf_host import UserError
from rlhf_host.protocols import (
    Backend,
    BackendStart,
    BackendTraits,
    RunsPasses,
    RuntimeStart,
    ShardedModel,
    TrainedModel,
    TrainingMemory,
)

ELEMENTWISE = ("AdamW", "Adam", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "SGD", "ASGD")
"""Optimizers of ``torch.optim`` whose step of a number depends on that number alone, so that it is the same in a piece."""
QUANTIZED = "backend fsdp cannot split weights in 4 bits: choose --backend torch, or leave quantize out"


class FSDP:
    """FSDP2 of PyTorch: weights, gradients and optimizer state are split over the ranks of a role."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        precision: Literal["auto", "fp32", "bf16"] = Field(
            "auto",
            description="type of the weights in passes (bf16: the optimizer has an fp32 copy, and autocast is off); fp32:"
            " train.autocast sets the precision of products; auto: bf16 on GPUs, else fp32",
        )
        shard: PositiveInt | None = Field(
            None,
            description="number of neighbouring ranks that split a copy of the weights; the next so many have another copy."
            " Default: all ranks split one",
        )
        expert_parallel: PositiveInt = Field(
            1,
            description="number of neighbouring ranks that share the experts of each layer: each computes its own for the tokens of"
            " all. It divides the ranks that split a copy of the weights, and the number of experts",
        )
        offload: Literal["none", "cpu"] = Field(
            "none", description="cpu: weights, gradients and optimizer state are in CPU memory, where the optimizer steps"
        )
        optimizer: str = Field(
            "AdamW", description=f"optimizer of torch.optim that steps each number alone: {', '.join(ELEMENTWISE)}"
        )
        optimizer_args: list[str] = Field([], description="KEY=VALUE for the optimizer, such as momentum=0.9")
        offload_while_sampling: Literal["all", "optimizer"] = Field(
            "all",
            description="what goes to CPU memory while engines sample on the same devices: weights and optimizer state, or the"
            " optimizer state alone, where the weights fit beside the engine",
        )

        @field_validator("optimizer")
        @classmethod
        def _steps_numbers(cls, name: str) -> str:
            if name in ELEMENTWISE:
                return name
            reason = {"Muon": "Muon needs whole matrices", "Adafactor": "Adafactor needs whole rows and columns"}.get(
                name, "8 bits share a scale among neighbours" if name.endswith("8bit") else f"{name} is not one of them"
            )
            raise ValueError(
                f"each process steps its own pieces of the weights, with {', '.join(ELEMENTWISE)}; {reason}: choose --backend torch"
            )

    traits = BackendTraits(debug=False, even_passes=True, sharded=True, everywhere=True, loads_shards=True, splits_frozen=True)

    def __init__(self, options: Options) -> None:
        self.options = options

    def check(self, start: RuntimeStart, devices: Mapping[str, str]) -> None:
        trained = {need.name for need in start.needs.roles if need.trainable}
        if any(role.quantize for name, role in start.roles.items() if name in trained):
            raise UserError(QUANTIZED)
        from rlhf_host.backends import check_optimizer

        for name in trained:
            check_optimizer(self.options.optimizer, self.options.optimizer_args, start.roles[name])
        if self.options.expert_parallel > 1:
            self._check_experts(start)

    def _check_experts(self, start: RuntimeStart) -> None:
        from rlhf_backend_fsdp.experts import has_experts, refuse_count
        from rlhf_host.internals import meta_model

        needs = start.needs.roles
        outlines = [
            meta_model(start.roles[need.name], head=need.head, trainable=need.trainable, weights=False) for need in needs
        ]
        for outline in outlines:
            if outline is not None:
                refuse_count(outline, self.options.expert_parallel)
        if not any(outline is None or has_experts(outline) for outline in outlines):
            names = ", ".join(need.name for need in needs)
            raise UserError(f"backend.expert_parallel splits experts, and no model of this run has any ({names}): leave it out")

    savers = ({"offload": "cpu"},)

    def memory(self, model: TrainedModel) -> TrainingMemory:
        options, on_gpu = self.options, model.device == "cuda"
        if model.processes % (shard := options.shard or model.processes):
            raise UserError(f"backend.shard {shard} does not divide the {model.processes} ranks of the role's group")
        narrow = options.precision == "bf16" or (options.precision == "auto" and on_gpu)
        width = 2 if narrow else 4
        # What is in no block stays whole during a pass; the next block is gathered while one computes. Gradients are whole in the
        # type of passes and, to be reduced, in float32: those of a block, and at last those of what is in none.
        if shard % (parallel := options.expert_parallel):
            raise UserError(
                f"backend.expert_parallel {parallel} does not divide the {shard} ranks that split a copy of the weights"
            )
        elsewhere = 1 - 1 / parallel  # share of a block's experts that are never gathered
        root = width * model.outside
        gathered = 2 * width * (model.block - elsewhere * model.experts)
        block = gathered + (width + 4) * (model.trained_block - elsewhere * model.trained_experts)
        away = options.offload == "cpu" and on_gpu
        held = 0.0 if away else 1 / shard
        from rlhf_host.backends import arguments_of, state_bytes

        plain = options.optimizer == "AdamW"
        kept = 8 if plain else state_bytes(options.optimizer, arguments_of(options.optimizer_args))
        left = 0.0 if options.offload_while_sampling == "all" else held * model.bytes
        return TrainingMemory(
            weights=held * model.bytes,
            gradients=held * 4 * model.trained,
            optimizer=held * kept * model.trained,
            gathered=root + block,
            ending=root + (width + 4) * model.trained_outside,
            stays=left if on_gpu else None,
            width=2 if narrow else None,
        )

    def load_model(self, role: Any, *, head: Literal["lm", "scalar"], trainable: bool) -> ShardedModel | None:
        from rlhf_host.distributed import load_sharded

        return load_sharded(role, head=head, trainable=trainable)

    def start(self, start: BackendStart) -> Backend:
        from rlhf_backend_fsdp.backend import FSDPBackend

        return FSDPBackend(self.options, start)

    def split(self, start: BackendStart) -> RunsPasses:
        from rlhf_backend_fsdp.frozen import FSDPFrozen

        return FSDPFrozen(self.options, start)
