"""Decoding steps as CUDA graphs: one launch in place of hundreds, over a static cache whose rows are filled again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict
from rlhf_kernels import choose

from rlhf_host.protocols import Decoder, Traits, Use

if TYPE_CHECKING:
    from torch import nn


class Options(BaseModel):
    """Options; there are none."""

    model_config = ConfigDict(extra="forbid")


class GraphKernels:
    """Faster sampling on CUDA: models whose state is keys and values."""

    Options = Options
    traits = Traits()
    choose = staticmethod(choose)

    def __init__(self, options: Options) -> None:
        self.options = options

    def unsuited(self, model: nn.Module, use: Use) -> str | None:
        from rlhf_kernels_graphs.suited import unsuited

        return unsuited(model, use)

    def twin(self, model: nn.Module, use: Use) -> Decoder:
        """Returns a decoder: the model's own modules, whose step is captured."""
        import torch

        from rlhf_kernels_graphs.capture import CAPTURES
        from rlhf_kernels_graphs.decoder import GraphDecoder

        # A buffer that is copied in inference mode could not be used in a pass with gradients later.
        with torch.inference_mode(False), torch.no_grad():
            return GraphDecoder(model, use, CAPTURES[use.device.type])
