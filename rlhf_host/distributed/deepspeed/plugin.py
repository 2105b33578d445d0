"""The backend ``deepspeed``: ZeRO stages 0 to 3, with the losses, clipping and schedule of ``torch``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

from rlhf_host.config.schema import RoleConfig
from rlhf_host.distributed.deepspeed.memory import memory_of
from rlhf_host.errors import UserError
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

OWNED = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "optimizer",
    "scheduler",
)
"""Keys of DeepSpeed's configuration that follow from the role and the batch."""


class DeepSpeed:
    """ZeRO: optimizer state (1), gradients (2) and weights (3) are split over the ranks of a role."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        zero_stage: Literal[0, 1, 2, 3] = Field(
            2, description="what is split over ranks: 1 optimizer state, 2 also gradients, 3 also weights; 0 nothing"
        )
        precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
            "auto",
            description="type of the weights in forward passes (16 bits: the optimizer has an fp32 copy); fp32: train.autocast sets"
            " the precision of products; fp16: needs train.on_nonfinite skip, because its first steps overflow; auto: bf16 at"
            " stage 3 on GPUs, else fp32",
        )
        optimizer: Literal["torch", "deepspeed"] = Field(
            "torch", description="AdamW of PyTorch, or of DeepSpeed, whose operators are compiled at the first use"
        )
        offload_optimizer: Literal["none", "cpu"] = Field(
            "none", description="keep optimizer state in CPU memory (stages 1 to 3)"
        )
        offload_param: Literal["none", "cpu"] = Field("none", description="keep weights in CPU memory (stage 3)")
        offload_while_sampling: Literal["all", "optimizer"] = Field(
            "all",
            description="what goes to CPU memory while engines sample on the same devices: weights and optimizer state, or the"
            " optimizer state alone, where the weights fit beside the engine",
        )
        reduce_bucket_size: PositiveInt = Field(50_000_000, description="numbers reduced at once")
        allgather_bucket_size: PositiveInt = Field(50_000_000, description="numbers gathered at once; stage 3: fetched ahead")
        param_persistence_threshold: int = Field(
            100_000, ge=0, description="stage 3: weights with at most this many numbers are not split"
        )
        zero_quantized_weights: bool = Field(False, description="ZeRO++: gather weights in 8 bits (stage 3)")
        zero_quantized_gradients: bool = Field(False, description="ZeRO++: reduce gradients in 4 bits between nodes (stage 3)")
        zero_hpz_partition_size: PositiveInt = Field(
            1, description="ZeRO++: number of ranks that together keep a second copy of the weights (stage 3)"
        )
        autotp_size: PositiveInt = Field(
            1,
            description="AutoTP: number of neighbouring processes that split every layer and get the same rows (stages 1 and 2)",
        )
        extra: dict[str, Any] = Field(default_factory=dict, description="merged into DeepSpeed's configuration")

        @model_validator(mode="after")
        def _together(self) -> DeepSpeed.Options:
            if self.zero_stage == 0 and self.precision in ("bf16", "fp16"):
                raise ValueError(f"precision {self.precision} needs zero_stage 1 to 3, which keep an fp32 copy of the weights")
            if self.zero_stage == 0 and self.offload_optimizer != "none":
                raise ValueError("offload_optimizer needs zero_stage 1 to 3")
            spread = {
                "offload_param": self.offload_param != "none",
                "zero_quantized_weights": self.zero_quantized_weights,
                "zero_quantized_gradients": self.zero_quantized_gradients,
                "zero_hpz_partition_size": self.zero_hpz_partition_size > 1,
            }
            if self.zero_stage < 3 and any(spread.values()):
                name = next(name for name, wanted in spread.items() if wanted)
                raise ValueError(f"{name} needs zero_stage 3")
            if self.autotp_size > 1 and self.zero_stage not in (1, 2):
                raise ValueError(f"autotp_size {self.autotp_size} needs zero_stage 1 or 2")
            if owned := [key for key in OWNED if key in self.extra]:
                raise ValueError(f"extra sets {owned[0]}, which follows from the role's settings and the batch: leave it out")
            return self

    def __init__(self, options: Options):
        self.options = options

    @property
    def traits(self) -> BackendTraits:
        split = self.options.zero_stage == 3 or self.options.autotp_size > 1
        pieces = self.options.zero_stage == 3 and self.options.autotp_size == 1
        # Gradients are reduced in the backward pass at every stage, below stage 2 in the last one, so no rank may be without.
        return BackendTraits(
            libraries=("deepspeed",),
            debug=False,
            parts=self.options.autotp_size,
            even_passes=True,
            sharded=split,
            loads_shards=pieces,
            splits_frozen=pieces,
            everywhere=True,
        )

    def check(self, start: RuntimeStart, devices: Mapping[str, str]) -> None:
        for name, role in start.roles.items():
            if any(need.name == name and need.trainable for need in start.needs.roles):
                ranks = 1 if name in devices else None
                self.refuse(devices.get(name), ranks, adapts=role.adapts, quantized=bool(role.quantize))

    def refuse(self, device: str | None, ranks: int | None, *, adapts: bool, quantized: bool) -> None:
        """Raises ``UserError`` for a role that cannot be trained this way. None: unknown."""
        options = self.options
        if ranks is not None and ranks % options.zero_hpz_partition_size:
            raise UserError(
                f"zero_hpz_partition_size {options.zero_hpz_partition_size} does not divide the {ranks} ranks of the role's group"
            )
        if options.autotp_size > 1 and adapts:
            raise UserError("AutoTP does not split layers that have adapters: leave autotp_size out, or train all weights")
        if quantized:
            raise UserError(
                "backend deepspeed cannot train over weights in 4 bits: choose --backend torch, or leave quantize out"
            )
        if device == "cpu" and options.precision == "fp16":
            raise UserError("precision fp16 needs a GPU: use bf16 or fp32")
        for name in ("zero_quantized_weights", "zero_quantized_gradients"):
            if device == "cpu" and getattr(options, name):
                raise UserError(f"{name} needs GPUs, because DeepSpeed quantizes by CUDA kernels: leave it off on CPUs")

    savers = ({"zero_stage": 3}, {"zero_stage": 3, "offload_optimizer": "cpu"})

    def memory(self, model: TrainedModel) -> TrainingMemory:
        return memory_of(self.options, model)

    def load_model(self, role: RoleConfig, *, head: Literal["lm", "scalar"], trainable: bool) -> ShardedModel | None:
        from rlhf_host.distributed.split.weight_reader import load_sharded

        return load_sharded(role, head=head, trainable=trainable)

    def start(self, start: BackendStart) -> Backend:
        from rlhf_host.distributed.deepspeed.backend import DeepSpeedBackend

        return DeepSpeedBackend(self, start)

    def split(self, start: BackendStart) -> RunsPasses:
        from rlhf_host.distributed.deepspeed.frozen import DeepSpeedFrozen

        return DeepSpeedFrozen(self.options, start)
