"""Llama-shaped models in float32 on CPUs: training in two functions per block, sampling in few operators."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict
from rlhf_kernels import choose

from rlhf_host import functional
from rlhf_host.protocols import Decoder, Traits, Use

if TYPE_CHECKING:
    from torch import nn


class Options(BaseModel):
    """Options; there are none."""

    model_config = ConfigDict(extra="forbid")


class CPUKernels:
    """Faster on CPUs: Llama, Mistral, Qwen2, Qwen3 and models with the same code."""

    Options = Options
    traits = Traits()
    choose = staticmethod(choose)

    def __init__(self, options: Options) -> None:
        self.options = options

    def unsuited(self, model: nn.Module, use: Use) -> str | None:
        from rlhf_kernels_cpu.llama import unsuited

        return unsuited(model, use)

    def twin(self, model: nn.Module, use: Use) -> nn.Module | Decoder:
        """Returns a twin. To train: the model's modules around its parameters, with blocks of few operators. To sample: a
        decoder.
        """
        import torch

        from rlhf_kernels_cpu.memory import keep_freed_memory

        keep_freed_memory()
        # A buffer that is copied in inference mode could not be used in a pass with gradients later.
        with torch.inference_mode(False):
            if use.purpose == "sample":
                from rlhf_kernels_cpu.decode import LlamaDecoder

                return LlamaDecoder(model)
            from rlhf_kernels_cpu.blocks import fuse_blocks

            return fuse_blocks(functional.twin(model))
