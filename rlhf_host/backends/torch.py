"""The backend ``torch``: AdamW, a schedule with warm-up, gradient clipping, non-finite steps refused."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from rlhf_host.protocols import Backend, BackendStart, BackendTraits, TrainedModel, TrainingMemory

BUCKET_BYTES = 2**26
"""Approximate size of the flat pieces in which gradients are summed."""


class Torch:
    """Plain PyTorch: every rank holds the whole model, and gradients are summed before the step."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

    traits = BackendTraits(state_bytes=12, everywhere=True, saved_bytes=8)  # in float32: the gradient, and two moments of AdamW

    def __init__(self, options: Options):
        self.options = options

    savers = ()

    def memory(self, model: TrainedModel) -> TrainingMemory:
        gradients = 4 * model.trained
        flat = min(max(BUCKET_BYTES, 4 * model.trained_outside), gradients) if model.processes > 1 else 0
        return TrainingMemory(weights=model.bytes, gradients=gradients + flat, optimizer=8 * model.trained)

    def start(self, start: BackendStart) -> Backend:
        from rlhf_host.backends.torch_backend import TorchBackend

        return TorchBackend(start)
