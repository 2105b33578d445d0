"""The engine ``vllm``: continuous batching over a paged cache, with its own weights, which a sync brings."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

from rlhf_host.distributed.vllm.arguments import (
    has_draft_model,
    quantizes_online,
    refusals,
    refused_on_cpus,
    unknown_argument,
    versions_by_token,
)
from rlhf_host.errors import UserError
from rlhf_host.plugins.recommended import recommended
from rlhf_host.protocols import Engine, EngineStart, EngineTraits, RuntimeStart, ServedModel, ServingMemory

log = logging.getLogger(__name__)

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Maximum ranks that vLLM can be set to."""


CPU_CACHE_BYTES = 1 << 29
MOST_TOLD, TIES = 128, 16
"""Largest top-k with which vLLM tells the tokens that could be drawn, and how many may tie with the last of them: it keeps these,
too. Each takes about 90 bytes per token while an answer is unfinished.
"""


class Vllm:
    """vLLM in this process, or with its core in a separate process."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        tensor_parallel_size: PositiveInt = Field(1, description="devices that share every layer")
        pipeline_parallel_size: PositiveInt = Field(1, description="devices that each hold some of the layers")
        multiprocess: bool | None = Field(
            None, description="run vLLM's core in a separate process; default: on GPUs, and with several devices"
        )
        gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="share of a GPU's memory for weights and cache")
        kv_cache_bytes: PositiveInt | None = Field(
            None, description="size of the key-value cache; default: what gpu_memory_utilization leaves, 512 MiB on a CPU"
        )
        max_model_len: PositiveInt | None = Field(
            None, description="longest prompt with completion, in tokens; default: the model's limit, or what fits the cache"
        )
        max_num_seqs: PositiveInt = Field(256, description="completions decoded together")
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
            "auto",
            description="auto: float32 on a CPU, else the model's type, or bfloat16 if that is float32; with quantization 16 bits",
        )
        quantization: Literal["fp8", "int8"] | None = Field(
            None, description="keep weights of linear layers in 8 bits, quantized anew at every sync"
        )
        enforce_eager: bool | None = Field(None, description="no compilation, no CUDA graphs; default: on a CPU")
        enable_prefix_caching: bool = Field(True, description="compute a prompt shared by several requests once")
        routed_experts: bool = Field(False, description="tell which experts each token took")
        kv_after_sync: Literal["recompute", "keep"] = Field(
            "recompute",
            description="keys and values of answers that go on under new weights: computed again, or those of the old ones, which"
            " requests of later groups never see",
        )
        seeds: bool = Field(
            True,
            description="draw each completion by its own seed, so that it depends on its key and the weights alone; false: by"
            " vLLM's own state, so that no repetition gives the same",
        )
        sleep: bool = Field(False, description="release the engine's memory between rollouts; GPUs only")
        extra: dict[str, Any] = Field(default_factory=dict, description="further arguments of vLLM's EngineArgs")

        @model_validator(mode="after")
        def _together(self) -> Vllm.Options:
            several = self.tensor_parallel_size * self.pipeline_parallel_size > 1
            if self.quantization and self.dtype == "float32":
                raise ValueError("quantization: activations are in 16 bits then, so leave dtype out")
            if self.multiprocess is False and several:
                raise ValueError("several devices need multiprocess: true")
            for problem in refusals(self.extra, own_process=self.multiprocess or several):
                raise ValueError(problem)
            return self

    def __init__(self, options: Options):
        self.options = options

    @property
    def traits(self) -> EngineTraits:
        options = self.options
        return EngineTraits(
            libraries=("vllm",),
            debug=False,
            takes="directory",
            largest_batch=options.max_num_seqs,
            devices=options.tensor_parallel_size * options.pipeline_parallel_size,
            sleeps=options.sleep,
            in_flight=versions_by_token(),
            adapters=True,
            images=True,
            support=MOST_TOLD,
        )

    def check(self, start: RuntimeStart, devices: Mapping[str, str]) -> None:
        extra, on_cpu = self.options.extra, devices.get("actor") == "cpu"
        problem = refused_on_cpus(self.options) if on_cpu else None
        if problem := problem or unknown_argument(extra):
            raise UserError(f"engine vllm: {problem}")
        if self.options.quantization:
            self._check_quantization(start)
        if on_cpu and self.options.sleep:
            log.warning("engine vllm: engine.sleep has no effect on a CPU")
        if has_draft_model(extra):
            log.warning(
                "engine vllm: no sync reaches the draft model of extra.speculative_config: answers stay right, but fewer drafts"
                " are taken as the policy changes; the method ngram has no weights"
            )
        if start.adapter_rank > RANKS[-1]:
            raise UserError(
                f"engine vllm takes adapters up to rank {RANKS[-1]}, not {start.adapter_rank}: leave --sync.adapter out"
            )

    def _check_quantization(self, start: RuntimeStart) -> None:
        if not quantizes_online():
            raise UserError("engine vllm: engine.quantization needs vLLM 0.32: leave it out")
        if start.adapter_rank:
            raise UserError("engine vllm: no proof tells that weights in 8 bits have their adapter: leave --sync.adapter out")
        if not start.total_updates:
            return
        fewer = f"engine vllm: tokens are sampled from weights in 8 bits ({self.options.quantization}), and others are trained"
        if corrections := start.hooks.names("importance_weights"):
            log.info("%s: %s corrects for that, and mismatch/mean says how far they differ", fewer, ", ".join(corrections))
        elif start.train.old_logprobs == "sampler":
            log.info("%s: ratios are against the sampler, and mismatch/mean says how far they differ", fewer)
        else:
            text = "%s: mismatch/mean says how far they differ, and nothing corrects for that (--with %s does)"
            log.warning(text, fewer, recommended("extension", "mismatch"))

    savers = (
        {"sleep": True},
        *({"gpu_memory_utilization": share} for share in (0.8, 0.65, 0.5, 0.35)),
        *({"sleep": True, "gpu_memory_utilization": share} for share in (0.8, 0.65, 0.5, 0.35)),
    )

    def memory(self, model: ServedModel) -> ServingMemory:
        options, on_cpu = self.options, model.device == "cpu"
        width = {"auto": 4 if on_cpu and not options.quantization else 2, "float32": 4}.get(options.dtype, 2)
        quantized = model.linear if options.quantization else 0
        weights = (width * (model.numbers - quantized) + quantized) / self.traits.devices
        asked = min(options.max_num_seqs, model.rows) * model.tokens * width * model.cached / self.traits.devices
        cache: float | None = options.kv_cache_bytes or (CPU_CACHE_BYTES if on_cpu else None)
        if cache is None and model.device_bytes is not None:  # whatever is left of its share
            share = options.gpu_memory_utilization
            return ServingMemory(weights=weights, cache=max(0.0, share * model.device_bytes - weights), share=share)
        return ServingMemory(weights=weights, cache=asked if cache is None else cache)

    def start(self, start: EngineStart) -> Engine:
        from rlhf_host.distributed.vllm.engine import VLLMEngine

        return VLLMEngine(self.options, start)
