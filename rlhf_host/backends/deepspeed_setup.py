"""DeepSpeed's surroundings: the backend's options, the configuration made of them, the library and its process group."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any, Literal

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

from rlhf_host.backends.ranks import Ranks
from rlhf_host.config.schema import RoleConfig
from rlhf_host.errors import PluginError, RunError, UserError

OWNED = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "optimizer",
    "scheduler",
)
"""Keys of DeepSpeed's configuration that follow from the role and the batch."""


class DeepSpeedOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    zero_stage: Literal[0, 1, 2, 3] = Field(
        2, description="what is spread over ranks: 1 optimizer state, 2 also gradients, 3 also weights; 0 nothing"
    )
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32",
        description="weights in forward passes, with an fp32 copy in the optimizer for 16 bits; with fp32, train.autocast"
        " chooses the precision of products. fp16 finds its loss scale by steps that overflow: train.on_nonfinite skip",
    )
    optimizer: Literal["torch", "deepspeed"] = Field(
        "torch", description="AdamW by PyTorch, or DeepSpeed's own, whose operators are compiled at the first use"
    )
    offload_optimizer: Literal["none", "cpu"] = Field("none", description="keep optimizer state in CPU memory (stages 1 to 3)")
    offload_param: Literal["none", "cpu"] = Field("none", description="keep weights in CPU memory (stage 3)")
    reduce_bucket_size: PositiveInt = Field(50_000_000, description="numbers reduced at once")
    allgather_bucket_size: PositiveInt = Field(50_000_000, description="numbers gathered at once; stage 3: fetched ahead")
    param_persistence_threshold: int = Field(
        100_000, ge=0, description="stage 3: weights of at most so many numbers stay whole on every rank"
    )
    zero_quantized_weights: bool = Field(False, description="ZeRO++: gather weights in 8 bits (stage 3)")
    zero_quantized_gradients: bool = Field(False, description="ZeRO++: reduce gradients in 4 bits between nodes (stage 3)")
    zero_hpz_partition_size: PositiveInt = Field(
        1, description="ZeRO++: ranks that keep a second whole copy of the weights between them, such as a node's (stage 3)"
    )
    autotp_size: PositiveInt = Field(
        1, description="AutoTP: neighbouring processes that split every layer and are given the same rows (stages 1 and 2)"
    )
    extra: dict[str, Any] = Field(default_factory=dict, description="merged into DeepSpeed's configuration")

    @model_validator(mode="after")
    def _together(self) -> DeepSpeedOptions:
        if self.zero_stage == 0 and self.precision != "fp32":
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


def configuration(options: DeepSpeedOptions, role: RoleConfig) -> dict[str, Any]:
    """DeepSpeed's configuration. One row per micro-batch stands for all: batches are counted and weighed by the host."""
    zero: dict[str, Any] = {
        "stage": options.zero_stage,
        "reduce_bucket_size": options.reduce_bucket_size,
        "allgather_bucket_size": options.allgather_bucket_size,
    }
    if options.offload_optimizer == "cpu":
        zero["offload_optimizer"] = {"device": "cpu"}
    if options.zero_stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": options.allgather_bucket_size,
            "stage3_param_persistence_threshold": options.param_persistence_threshold,
            "zero_quantized_weights": options.zero_quantized_weights,
            "zero_quantized_gradients": options.zero_quantized_gradients,
            "zero_hpz_partition_size": options.zero_hpz_partition_size,
        }
        if options.offload_param == "cpu":
            zero["offload_param"] = {"device": "cpu"}
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": role.max_grad_norm,
        "steps_per_print": sys.maxsize,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if options.precision == "bf16":
        made["bf16"] = {"enabled": True, "check_grad_overflow": True}
    elif options.precision == "fp16":
        made["fp16"] = {"enabled": True}
    if options.precision != "fp32":
        made["data_types"] = {"grad_accum_dtype": "fp32"}
    if options.autotp_size > 1:
        made["tensor_parallel"] = {"autotp_size": options.autotp_size}
    return _merged(made, options.extra)


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in over.items():
        inner = result.get(key)
        result[key] = _merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return result


def refuse(options: DeepSpeedOptions, device: torch.device, ranks: Ranks) -> None:
    """Raises ``UserError`` for options that cannot be had on this device or with so many processes."""
    if device.type == "cpu":
        if options.precision == "fp16":
            raise UserError("precision fp16 needs a GPU: take bf16 or fp32")
        for name in ("zero_quantized_weights", "zero_quantized_gradients"):
            if getattr(options, name):
                raise UserError(f"{name} needs GPUs, because DeepSpeed quantizes by CUDA kernels: leave it off on CPUs")
    if options.autotp_size != ranks.parts:
        raise UserError(
            f"autotp_size {options.autotp_size} splits a model over so many processes, and here one has all of it: take"
            f" --runtime ray and place the role on {options.autotp_size} devices or a multiple"
        )
    if ranks.size % options.zero_hpz_partition_size:
        raise UserError(
            f"zero_hpz_partition_size {options.zero_hpz_partition_size} does not divide the {ranks.size} ranks of the role's group"
        )


def enter_group(ranks: Ranks, device: torch.device) -> None:
    """torch's default group and the environment, as DeepSpeed wants to find them."""
    if not dist.is_initialized():
        if ranks.processes > 1:
            raise RunError("the ranks have not joined a process group")
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    if dist.get_world_size() != ranks.processes:
        raise UserError(
            f"backend 'deepspeed' is set up for {ranks.processes} processes, but torch's process group has {dist.get_world_size()}"
        )
    rank, size = dist.get_rank(), dist.get_world_size()
    local = device.index or 0 if device.type == "cuda" else rank
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(local))
    os.environ.setdefault("LOCAL_SIZE", str(size))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")


def library(device: torch.device) -> Any:
    # Read once, when DeepSpeed is imported.
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    try:
        import deepspeed
        import deepspeed.ops.adam
    except ModuleNotFoundError as error:
        if error.name != "deepspeed":
            raise
        raise PluginError("backend 'deepspeed' needs the package deepspeed: pip install 'rlhf-host[deepspeed]'") from error
    # A kernel for inference on CPUs, which takes minutes to compile at the first use.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    warnings.filterwarnings("ignore", message=".*torch.distributed.* is deprecated", category=FutureWarning)
    found = deepspeed.accelerator.get_accelerator().device_name()
    if found != device.type:
        raise UserError(f"DeepSpeed runs on {found} in this process (DS_ACCELERATOR), but the model is on {device.type}")
    return deepspeed
