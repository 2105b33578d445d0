"""The backend ``torch``: AdamW, a schedule with warm-up, gradient clipping, non-finite steps refused."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from rlhf_host.protocols import Backend, BackendStart, BackendTraits


class Torch:
    """Plain PyTorch: every rank holds the whole model, and gradients are summed before the step."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

    traits = BackendTraits(state_bytes=12, everywhere=True)  # in float32: the gradient, and two moments of AdamW

    def __init__(self, options: Options):
        self.options = options

    def start(self, start: BackendStart) -> Backend:
        from rlhf_host.backends.torch_backend import TorchBackend

        return TorchBackend(start)
