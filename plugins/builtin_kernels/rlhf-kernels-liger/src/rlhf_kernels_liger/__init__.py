"""Liger's root-mean-square norms, SwiGLU and GEGLU on GPUs, in a twin of the model; nothing of transformers is replaced."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict
from rlhf_kernels import choose

from rlhf_host import functional
from rlhf_host.protocols import Traits, Use

if TYPE_CHECKING:
    from torch import nn


class Options(BaseModel):
    """Options; there are none."""

    model_config = ConfigDict(extra="forbid")


class LigerKernels:
    """Faster on CUDA: models with root-mean-square norms and gated MLPs."""

    Options = Options
    traits = Traits(libraries=("liger_kernel", "triton"))
    choose = staticmethod(choose)

    def __init__(self, options: Options) -> None:
        self.options = options

    def unsuited(self, model: nn.Module, use: Use) -> str | None:
        from rlhf_kernels.parts import is_gated_mlp, is_norm

        if use.purpose == "sample":
            return "it makes no decoder"
        # Triton's interpreter runs kernels without a GPU, for tests.
        if use.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            return "Triton needs CUDA"
        if not any(is_norm(part) or is_gated_mlp(part) for part in model.modules()):
            return "it has no root-mean-square norm and no gated MLP"
        return None

    def twin(self, model: nn.Module, use: Use) -> nn.Module:
        """Returns the model's modules around its parameters, with Liger's kernels in norms and MLPs."""
        from rlhf_kernels_liger.layers import patch_layers

        return patch_layers(functional.twin(model))
