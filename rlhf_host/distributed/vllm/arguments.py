"""Meaning of arguments of vLLM's ``EngineArgs`` to the host: those that it refuses, and what follows from others."""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf_host.errors import near_matches

_OWNED = "the engine sets this itself, from its own options"
_BESIDE = "engines side by side are this (--placement rollout=N), so leave it out"
_PLACED = "a placement would not count these devices: use tensor_parallel_size or pipeline_parallel_size"
_ADAPTER = "follows from the adapter that a sync brings (--sync.adapter)"
_OTHER = "the engine is given the directory of the run's model, so leave it out"
_OUTLIVES = "keys and values kept outside the cache would outlive a sync"
_DISTRIBUTION = "tokens would not be drawn from the trainer's distribution"

REFUSED: dict[str, str] = {
    **dict.fromkeys(
        (
            *("model", "tokenizer", "tensor_parallel_size", "pipeline_parallel_size", "gpu_memory_utilization", "max_num_seqs"),
            *("enable_prefix_caching", "load_format", "kv_cache_memory_bytes", "max_model_len", "dtype", "enforce_eager"),
            *("enable_sleep_mode", "logprobs_mode", "max_logprobs", "worker_extension_cls", "generation_config"),
        ),
        _OWNED,
    ),
    **dict.fromkeys(
        (
            *("data_parallel_size", "data_parallel_size_local", "data_parallel_rank", "data_parallel_start_rank"),
            *("data_parallel_address", "data_parallel_rpc_port", "data_parallel_backend", "data_parallel_hybrid_lb"),
            *("data_parallel_external_lb", "data_parallel_multi_port_external_lb", "enable_elastic_ep"),
        ),
        _BESIDE,
    ),
    **dict.fromkeys(
        ("prefill_context_parallel_size", "device_ids", "nnodes", "node_rank", "master_addr", "master_port"), _PLACED
    ),
    **dict.fromkeys(("enable_lora", "max_loras", "max_lora_rank"), _ADAPTER),
    **dict.fromkeys(("model_weights", "revision", "code_revision", "tokenizer_revision", "hf_config_path"), _OTHER),
    **dict.fromkeys(("kv_transfer_config", "ec_transfer_config", "kv_offloading_size", "kv_offloading_backend"), _OUTLIVES),
    **dict.fromkeys(("logits_processors", "watermark_config"), _DISTRIBUTION),
    "override_generation_config": "every request brings its own settings (--rollout.temperature and others)",
    "enable_return_routed_experts": "this is --engine.routed-experts",
    **dict.fromkeys(("quantization", "quantization_config"), "this is --engine.quantization"),
    "worker_cls": "weights come through vLLM's own worker",
    "enable_eplb": "vLLM would move experts between devices, and a sync would not find them",
    "weight_transfer_config": "weights come by --sync",
}
"""Argument → why the engine refuses it."""

QUANTIZATIONS = {
    "fp8": "fp8_per_channel_static",
    "int8": "int8_per_channel_static",
}
"""``Vllm.Options.quantization`` → vLLM's name for how weights of linear layers are rounded, online."""

SPECULATION = ("speculative_config", "spec_method", "spec_model", "spec_tokens")
WITHOUT_DRAFT_WEIGHTS = ("ngram", "ngram_gpu", "suffix")
"""Methods of speculation that have no weights of their own."""


def refusals(extra: Mapping[str, Any], *, own_process: bool | None) -> Iterator[str]:
    """Yields what is wrong with further arguments.

    Args:
        own_process: whether vLLM's core has a process of its own; None: decided later, by the device.
    """
    for name in sorted(REFUSED.keys() & extra.keys()):
        yield f"extra.{name}: {REFUSED[name]}"
    if "async_scheduling" in extra and not own_process:
        yield "extra.async_scheduling: needs multiprocess: true, because nothing may be under way between two steps here"
    speculation = extra.get("speculative_config") or {}
    if not isinstance(speculation, Mapping):
        yield f"extra.speculative_config should be a mapping, not {speculation!r}"
    elif speculation.get("rejection_sample_method", "standard") != "standard":
        yield f"extra.speculative_config.rejection_sample_method: {_DISTRIBUTION}, so leave it out"


def unknown_argument(extra: Mapping[str, Any]) -> str | None:
    """Returns what is wrong with a name that vLLM does not have."""
    if not extra or not (source := _source("engine/arg_utils.py")):
        return None
    classes = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "EngineArgs")
    fields = [ast.unparse(node.target) for owner in classes for node in owner.body if isinstance(node, ast.AnnAssign)]
    name = next((name for name in extra if name not in fields), None)
    return name and f"extra.{name}: vLLM's EngineArgs has no such argument{near_matches(name, fields)}"


def quantizes_online() -> bool:
    """Returns True if vLLM can quantize linear layers anew whenever weights come, as that of 0.32; True without vLLM."""
    return all(f'"{name}"' in (_source("config/quantization.py") or f'"{name}"') for name in QUANTIZATIONS.values())


@functools.cache
def versions_by_token() -> bool:
    """Returns True if vLLM's answers say which weights sampled each token, as those of 0.32 do; True without vLLM."""
    return "weight_versions" in (_source("outputs.py") or "weight_versions")


def _source(name: str) -> str:
    """Returns the text of a file of vLLM, which is not imported, because that takes long; nothing without vLLM."""
    package = importlib.util.find_spec("vllm")
    return (Path(package.origin).parent / name).read_text() if package and package.origin else ""


def refused_on_cpus(options: Any) -> str | None:
    """Returns what is wrong with ``Vllm.Options`` on CPUs alone.

    vLLM 0.32 leaves temperature, top-k and top-p out of speculated tokens there: its ``expand_kernel`` for CPUs writes to copies
    (``vllm/utils/cpu_triton_utils.py``).
    """
    extra = options.extra
    if options.pipeline_parallel_size > 1:
        return "pipeline_parallel_size above 1 needs GPUs; tensor_parallel_size works on CPUs"
    if options.routed_experts:
        return "routed_experts needs vLLM's second model runner, and so a GPU: leave it out, and what reads it"
    if "enable_chunked_prefill" in extra:
        return "extra.enable_chunked_prefill: on CPUs the engine sets this itself, so leave it out"
    if _speculation(extra):
        name = next(name for name in SPECULATION if extra.get(name))
        return f"extra.{name}: on CPUs vLLM draws speculated tokens from another distribution, so leave it out"
    return None


def _speculation(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings of speculation, in whichever form they are given."""
    short = {name: extra.get(f"spec_{name}") for name in ("method", "model", "tokens")}
    return {name: value for name, value in short.items() if value} | dict(extra.get("speculative_config") or {})


def has_draft_model(extra: Mapping[str, Any]) -> bool:
    """Returns True if speculation uses weights of its own, which no sync brings."""
    settings = _speculation(extra)
    method, model = settings.get("method"), settings.get("model")
    if method in WITHOUT_DRAFT_WEIGHTS or model in WITHOUT_DRAFT_WEIGHTS:
        return False
    return bool(method or model)


def has_unsynced(extra: Mapping[str, Any], adapter_rank: int) -> bool:
    """Returns True for weights that no sync brings, which must be kept in sleep: of an adapter's base, and of a draft model.

    Args:
        adapter_rank: as in ``EngineStart``.
    """
    return bool(adapter_rank) or has_draft_model(extra)


def is_exact(dtype: str, quantization: str | None, cache_dtype: str) -> bool:
    """Returns True if log-probabilities are as exact as float32 makes them: nothing is kept in fewer bits.

    Args:
        dtype: type of weights and activations, such as ``float32``.
        quantization: vLLM's name of the method by which weights are quantized.
        cache_dtype: type of keys and values; ``auto``: as ``dtype``.
    """
    return dtype == "float32" and quantization is None and cache_dtype == "auto"
