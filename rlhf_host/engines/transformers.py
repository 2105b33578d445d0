"""The engine ``transformers``: batched generation with the trainer's own module, in this process."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from rlhf_host.protocols import Engine, EngineStart, EngineTraits, ServedModel, ServingMemory
from rlhf_host.records.sampling import MOST


class Transformers:
    """Engine for any causal language model of transformers."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        max_batch_size: PositiveInt = Field(256, description="completions decoded together")
        max_batch_tokens: PositiveInt | None = Field(
            None, description="tokens of key-value cache in one batch; default: no limit"
        )
        max_wait_s: float = Field(
            5.0, ge=0, description="longest wait for expected requests before a batch starts without them"
        )
        kv_after_sync: Literal["recompute", "keep"] = Field(
            "recompute",
            description="keys and values of answers that go on under new weights: computed again, or those of the old ones",
        )
        autocast: Literal["auto", "off", "bfloat16"] = Field(
            "auto", description="type that float32 weights compute in; auto: bfloat16 where the hardware has it (CUDA)"
        )

    traits = EngineTraits(takes="module", waves=True, in_flight=True, images=True, support=MOST)

    def __init__(self, options: Options):
        self.options = options

    savers = ({"max_batch_size": 32},)

    def memory(self, model: ServedModel) -> ServingMemory:
        narrow = self.options.autocast == "bfloat16" or (self.options.autocast == "auto" and model.device == "cuda")
        tokens = min(self.options.max_batch_size, model.rows) * model.tokens
        tokens = min(tokens, self.options.max_batch_tokens or tokens)
        rounded = model.rounded if model.in_place else narrow
        # Under autocast keys are in float32, after their rotation, and values in 16 bits.
        cache = tokens * model.cached * (2 if rounded else 3 if narrow else 4)
        weights = 0 if model.in_place else (2 if rounded else 4) * model.numbers
        return ServingMemory(weights=weights, cache=cache, autocast=narrow and not rounded)

    def start(self, start: EngineStart) -> Engine:
        from rlhf_host.engines.embedded import EmbeddedEngine

        return EmbeddedEngine(self.options, start)
