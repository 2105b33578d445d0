"""The backend ``fsdp``: PyTorch's FSDP2, with the losses, clipping and schedule of ``torch``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from rlhf_host import UserError
from rlhf_host.protocols import Backend, BackendStart, BackendTraits, RunsPasses, RuntimeStart, TrainedModel, TrainingMemory

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
        offload: Literal["none", "cpu"] = Field(
            "none", description="cpu: weights, gradients and optimizer state are in CPU memory, where the optimizer steps"
        )
        offload_while_sampling: Literal["all", "optimizer"] = Field(
            "all",
            description="what goes to CPU memory while engines sample on the same devices: weights and optimizer state, or the"
            " optimizer state alone, where the weights fit beside the engine",
        )

    traits = BackendTraits(debug=False, even_passes=True, sharded=True, everywhere=True, in_pieces=True, splits_frozen=True)

    def __init__(self, options: Options) -> None:
        self.options = options

    def check(self, start: RuntimeStart, devices: Mapping[str, str]) -> None:
        trained = {need.name for need in start.needs.roles if need.trainable}
        if any(role.quantize for name, role in start.roles.items() if name in trained):
            raise UserError(QUANTIZED)

    savers = ({"offload": "cpu"},)

    def memory(self, model: TrainedModel) -> TrainingMemory:
        options, on_gpu = self.options, model.device == "cuda"
        if model.processes % (shard := options.shard or model.processes):
            raise UserError(f"backend.shard {shard} does not divide the {model.processes} ranks of the role's group")
        narrow = options.precision == "bf16" or (options.precision == "auto" and on_gpu)
        width = 2 if narrow else 4
        # What is in no block stays whole during a pass; the next block is gathered while one computes. Gradients are whole in the
        # type of passes and, to be reduced, in float32: those of a block, and at last those of what is in none.
        root = width * model.outside
        block = 2 * width * model.block + (width + 4) * model.trained_block
        away = options.offload == "cpu" and on_gpu
        held = 0.0 if away else 1 / shard
        left = 0.0 if options.offload_while_sampling == "all" else held * model.bytes
        return TrainingMemory(
            weights=held * model.bytes,
            gradients=held * 4 * model.trained,
            optimizer=held * 8 * model.trained,
            gathered=root + block,
            ending=root + (width + 4) * model.trained_outside,
            stays=left if on_gpu else None,
            width=2 if narrow else None,
        )

    def start(self, start: BackendStart) -> Backend:
        from rlhf_backend_fsdp.backend import FSDPBackend

        return FSDPBackend(self.options, start)

    def split(self, start: BackendStart) -> RunsPasses:
        from rlhf_backend_fsdp.frozen import FSDPFrozen

        return FSDPFrozen(self.options, start)
