"""Start of vLLM: its arguments, and the checks before it."""

from __future__ import annotations

import contextlib
import os
import random
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError

from rlhf_host import errors
from rlhf_host.distributed.vllm.arguments import QUANTIZATIONS, has_draft_model, refused_on_cpus, versions_by_token
from rlhf_host.distributed.vllm.plugin import CPU_CACHE_BYTES, MOST_TOLD, RANKS, TIES, Vllm
from rlhf_host.distributed.vllm.process import own_process
from rlhf_host.engines.requests import end_tokens
from rlhf_host.errors import UserError
from rlhf_host.protocols import NO_WEIGHTS


def start_vllm(
    options: Vllm.Options, path: str, tokenizer: Any, version: int, scratch: Path, adapter_rank: int = 0
) -> tuple[Any, torch.device]:
    """Returns vLLM's ``LLMEngine`` for the model directory ``path``, and the object that receives weights.

    Args:
        adapter_rank: as in ``EngineStart``.

    Raises:
        UserError: vLLM cannot serve the model as configured.
    """
    multiprocess = in_processes(options)
    _set_environment()
    with _torch_as_it_was():
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.llm_engine import LLMEngine

        on_cpu = current_platform.is_cpu()
        if on_cpu and (problem := refused_on_cpus(options)):
            raise UserError(f"engine vllm: {problem}")
        arguments = _arguments(options, version, on_cpu) | _adapter_arguments(adapter_rank)
        arguments |= {"model": path, "tokenizer": _tokenizer_path(path, tokenizer, scratch)}
        quiet = arguments.pop("disable_log_stats")
        try:
            with own_process() if multiprocess else contextlib.nullcontext():
                llm: Any = LLMEngine.from_engine_args(EngineArgs(**arguments), enable_multiprocessing=multiprocess)
        except Exception as error:
            raise UserError(f"engine vllm cannot serve {path}: {first_line(error)}") from error
    problem = _attention_problem(llm.vllm_config.model_config, on_cpu)
    if options.quantization and not llm.collective_rpc("quantized_layers")[0]:
        problem = problem or f"none of its layers can be kept in {options.quantization}: leave engine.quantization out"
    if problem:
        llm.engine_core.shutdown()
        raise UserError(f"engine vllm cannot serve {path}: {problem}")
    if quiet:
        # Of its statistics the host needs those that the core sends (``measures``), not what vLLM makes of them for logs.
        llm.log_stats, llm.logger_manager = False, None
    if multiprocess:
        llm.collective_rpc("end_with", args=(os.getpid(),))
    if versions_by_token():
        llm.set_weight_version(str(version))
    return llm, torch.device("cpu" if on_cpu or multiprocess else current_platform.device_type)


def in_processes(options: Vllm.Options) -> bool:
    """Returns True if vLLM's core runs in processes of its own: on GPUs, so that it schedules a step while one computes."""
    if options.multiprocess is not None:
        return options.multiprocess
    return on_gpus() or options.tensor_parallel_size * options.pipeline_parallel_size > 1


def on_gpus() -> bool:
    return torch.cuda.is_available()


def _arguments(options: Vllm.Options, version: int, on_cpu: bool) -> dict[str, Any]:
    same = {"tensor_parallel_size", "pipeline_parallel_size", "gpu_memory_utilization", "max_num_seqs", "enable_prefix_caching"}
    own = options.model_dump(include=same) | {
        "load_format": "dummy" if version <= NO_WEIGHTS else "auto",
        "kv_cache_memory_bytes": options.kv_cache_bytes or (CPU_CACHE_BYTES if on_cpu else None),
        "max_model_len": options.max_model_len or -1,
        "dtype": ("bfloat16" if options.quantization else "float32") if options.dtype == "auto" and on_cpu else options.dtype,
        "enforce_eager": on_cpu if options.enforce_eager is None else options.enforce_eager,
        "enable_sleep_mode": options.sleep and not on_cpu,
        # After temperature, top-k, top-p and min-p: the distribution the token was drawn from.
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": MOST_TOLD + TIES,
        "worker_extension_cls": "rlhf_host.distributed.vllm.worker.WeightLoading",
        "generation_config": "vllm",
    }
    if options.quantization:
        own |= {"quantization": "online", "quantization_config": {"linear": QUANTIZATIONS[options.quantization]}}
    if options.routed_experts:  # vLLM's first model runner does not tell them
        own["enable_return_routed_experts"] = True
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")
    if version <= NO_WEIGHTS and has_draft_model(options.extra):
        # No sync reaches it, so its weights are those of its files.
        drafts = {"draft_load_config": {"load_format": "auto"}}
        own["speculative_config"] = drafts | dict(options.extra.get("speculative_config") or {})
    if not in_processes(options):
        # Between two steps nothing may be under way: weights change there.
        own["async_scheduling"] = False
    if on_cpu:
        # A step that computes a part of a prompt sets back the request's generator, which vLLM can on CUDA alone.
        own["enable_chunked_prefill"] = False
    # Left to itself vLLM takes Ray where there is a placement group, and asks it for devices that this engine holds already.
    executor = "mp" if options.tensor_parallel_size * options.pipeline_parallel_size > 1 else "uni"
    defaults: dict[str, Any] = {"disable_log_stats": True, "seed": 0, "distributed_executor_backend": executor}
    if on_cpu:
        defaults["block_size"] = 32
    return defaults | options.extra | own


def _adapter_arguments(rank: int) -> dict[str, Any]:
    """Returns the arguments for one adapter beside the weights of the base, which are then read from disk."""
    if not rank:
        return {}
    largest = next((known for known in RANKS if known >= rank), None)
    if largest is None:
        raise UserError(f"engine vllm takes adapters up to rank {RANKS[-1]}, not {rank}: leave --sync.adapter out")
    return {"load_format": "auto", "enable_lora": True, "max_loras": 1, "max_lora_rank": largest}


def _tokenizer_path(path: str, tokenizer: Any, scratch: Path) -> str:
    """Returns a directory with the tokenizer's files, which vLLM needs for stop strings."""
    if tokenizer is None or (Path(path) / "tokenizer_config.json").exists():
        return path
    directory = scratch / "tokenizer"
    tokenizer.save_pretrained(directory)
    return str(directory)


def _attention_problem(settings: Any, on_cpu: bool) -> str | None:
    """Returns a problem of attention that vLLM itself finds only when the first request kills it."""
    if not on_cpu or settings.use_mla:
        return None
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    size, known = settings.get_head_size(), CPUAttentionBackend.get_supported_head_sizes()
    return None if size in known else f"attention heads of size {size}, on CPUs it has only {', '.join(map(str, known))}"


def _set_environment() -> None:
    """Sets the environment variables that vLLM reads, unless the user has set them."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    for name, value in {
        "VLLM_NO_USAGE_STATS": "1",  # it would send statistics of use to a server
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork would share locks of threads
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # engines that share a machine would all bind to the same cores
    }.items():
        os.environ.setdefault(name, value)
    if not torch.cuda.is_available():
        # Compiling the sampler's helpers takes longer than they ever save here.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


@contextlib.contextmanager
def _torch_as_it_was() -> Iterator[None]:
    """Restores torch after vLLM has started. Its start seeds every global generator, puts a rank before every traceback and, on
    a CPU, replaces ``torch.set_num_threads`` by a function that does nothing.
    """
    threads, hook, python, numpy = torch.set_num_threads, sys.excepthook, random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        torch.set_num_threads, sys.excepthook = threads, hook
        random.setstate(python)
        np.random.set_state(numpy)


def ends_of(path: str, tokenizer: Any) -> set[int]:
    """Returns the tokens that end a completion, from the model's generation config (or config) and its tokenizer."""
    from transformers import AutoConfig, GenerationConfig

    try:
        settings: Any = GenerationConfig.from_pretrained(path)
    except OSError:
        settings = AutoConfig.from_pretrained(path).get_text_config()
    return end_tokens(settings, tokenizer)


def first_line(error: BaseException) -> str:
    """Returns the first line with content; for pydantic's errors, that of the first error."""
    return errors.first_line(error.errors()[0]["msg"] if isinstance(error, ValidationError) else error)
