"""The host's own Triton kernels on GPUs: norms with their residual, rotary embedding, SwiGLU, and the head's log-probabilities."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict
from rlhf_kernels import choose

from rlhf_host import functional
from rlhf_host.protocols import TokenLogprobs, Traits, Use

if TYPE_CHECKING:
    from torch import nn


class Options(BaseModel):
    """Options; there are none."""

    model_config = ConfigDict(extra="forbid")


class TritonKernels:
    """Faster on CUDA: root-mean-square norms, rotary embedding, SwiGLU and log-probabilities in one kernel each."""

    Options = Options
    traits = Traits(libraries=("triton",))
    choose = staticmethod(choose)

    def __init__(self, options: Options) -> None:
        self.options = options

    def unsuited(self, model: nn.Module, use: Use) -> str | None:
        from rlhf_kernels_triton.layers import has_parts

        if use.purpose == "sample":
            return "it makes no decoder"
        return _not_here(use) or (None if has_parts(model) else "no root-mean-square norm, rotary embedding or SwiGLU")

    def twin(self, model: nn.Module, use: Use) -> nn.Module:
        """Returns the model's modules around its parameters, with kernels in norms, MLPs, attention and layers. Weights may be
        fake.
        """
        from rlhf_kernels_triton.layers import fuse_layers

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # by torch, where it copies a buffer
            twin = functional.twin(model)
        return fuse_layers(twin)

    def token_logprobs(self, use: Use) -> TokenLogprobs | None:
        """Returns what computes a head's log-probabilities; None where these kernels cannot run."""
        from rlhf_kernels_triton.head import token_logprobs

        return None if _not_here(use) else token_logprobs


def _not_here(use: Use) -> str | None:
    import torch

    # Triton's interpreter runs kernels without a GPU, for tests.
    if use.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return "Triton needs CUDA"
    return "it computes in 32 or 16 bits" if torch.float64 in (use.dtype, use.autocast) else None
