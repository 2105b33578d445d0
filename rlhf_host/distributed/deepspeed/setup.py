"""DeepSpeed's surroundings: its configuration, the library and its process group."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rlhf_host.config.schema import RoleConfig
from rlhf_host.distributed.deepspeed.plugin import DeepSpeed
from rlhf_host.errors import PluginError, RunError, UserError
from rlhf_host.models.adapters import expert_adapters
from rlhf_host.protocols import Ranks


def configuration(options: DeepSpeed.Options, role: RoleConfig) -> dict[str, Any]:
    """Returns DeepSpeed's configuration. It names one row per micro-batch for all: the host counts and weights batches."""
    zero = {"stage": options.zero_stage} | options.model_dump(include={"reduce_bucket_size", "allgather_bucket_size"})
    if options.offload_optimizer == "cpu":
        zero["offload_optimizer"] = {"device": "cpu"}
    if options.zero_stage == 3:
        zero |= options.model_dump(include={"zero_quantized_weights", "zero_quantized_gradients", "zero_hpz_partition_size"})
        zero["stage3_prefetch_bucket_size"] = options.allgather_bucket_size
        zero["stage3_param_persistence_threshold"] = options.param_persistence_threshold
        if options.offload_param == "cpu":
            zero["offload_param"] = {"device": "cpu"}
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": role.max_grad_norm,
        "steps_per_print": sys.maxsize,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if options.precision == "bf16":
        settings["bf16"] = {"enabled": True, "check_grad_overflow": True}
    elif options.precision == "fp16":
        settings["fp16"] = {"enabled": True}
    if options.precision != "fp32":
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    if options.autotp_size > 1:
        settings["tensor_parallel"] = {"autotp_size": options.autotp_size}
    return _merged(settings, options.extra)


def on_device(options: DeepSpeed.Options, device: torch.device) -> DeepSpeed.Options:
    """Returns the options with the precision that is used on a device.

    At stage 3 autocast would keep a copy in 16 bits of every weight that is gathered, until the forward pass ends: the whole
    model on each device, though its weights are split.
    """
    if options.precision != "auto":
        return options
    gathers = options.zero_stage == 3 and device.type == "cuda" and torch.cuda.is_bf16_supported()
    return options.model_copy(update={"precision": "bf16" if gathers else "fp32"})


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in over.items():
        inner = result.get(key)
        result[key] = _merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return result


def refuse_splits(options: DeepSpeed.Options, ranks: Ranks, model: nn.Module) -> None:
    """Raises ``UserError`` if AutoTP would split a model over other processes than there are, or stage 3 one whose adapters read
    weights before they are whole.
    """
    if options.zero_stage == 3 and (experts := expert_adapters(model)):
        raise UserError(f"zero_stage 3 does not train {experts[0]}, an adapter of experts: choose stage 2, or another backend")
    if options.autotp_size > 1 and ranks.slices is not None:
        raise UserError("AutoTP and sequence_parallel both split a rank's work over its processes: leave one of them out")
    if options.autotp_size != (ranks.parts if ranks.slices is None else 1):
        raise UserError(
            f"autotp_size {options.autotp_size} splits a model over so many processes, but here one has all of it: use"
            f" --runtime ray and place the role on {options.autotp_size} devices or a multiple"
        )


def enter_group(ranks: Ranks, device: torch.device) -> None:
    """Prepares torch's default group and the environment as DeepSpeed expects them."""
    processes = ranks.processes
    if not dist.is_initialized():
        if processes > 1:
            raise RunError("the ranks have not joined a process group")
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    if dist.get_world_size() != processes:
        raise UserError(
            f"backend 'deepspeed' is set up for {processes} processes, but torch's process group has {dist.get_world_size()}"
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
    accelerator = deepspeed.accelerator.get_accelerator().device_name()
    if accelerator != device.type:
        raise UserError(f"DeepSpeed runs on {accelerator} in this process (DS_ACCELERATOR), but the model is on {device.type}")
    return deepspeed
