"""The backend ``torch``: an optimizer by name, a schedule with warm-up, gradient clipping, non-finite steps refused."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field

from rlhf_host.errors import UserError
from rlhf_host.protocols import Backend, BackendStart, BackendTraits, RuntimeStart, TrainedModel, TrainingMemory

BUCKET_BYTES = 2**26
"""Approximate size of the flat pieces in which gradients are summed."""


class Torch:
    """Plain PyTorch: every rank holds the whole model, and gradients are summed before the step."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        optimizer: str = Field(
            "AdamW",
            description="optimizer of torch.optim, such as SGD or Adafactor, or of bitsandbytes, such as AdamW8bit; Muon is for the"
            " matrices of blocks, with AdamW for all others",
        )
        optimizer_args: list[str] = Field([], description="KEY=VALUE for the optimizer, such as momentum=0.9")

    def __init__(self, options: Options):
        self.options = options

    @property
    def _state_bytes(self) -> float:
        """Bytes of the optimizer's state per trained number: of AdamW two moments in float32, 0 for what ``check`` refuses."""
        if self.options.optimizer == "AdamW":
            return 8
        from rlhf_host.backends.optimizers import arguments_of, state_bytes

        try:
            return state_bytes(self.options.optimizer, arguments_of(self.options.optimizer_args))
        except UserError:
            return 0

    @property
    def traits(self) -> BackendTraits:
        kept = round(self._state_bytes)  # and the gradient in float32
        return BackendTraits(state_bytes=4 + kept, everywhere=True, saved_bytes=kept, masters=True)

    def check(self, start: RuntimeStart, devices: Mapping[str, str]) -> None:
        """Raises ``UserError`` for an optimizer that cannot be made, or that lacks what a role sets."""
        from rlhf_host.backends.optimizers import check_optimizer

        for need in start.needs.roles:
            if need.trainable:
                check_optimizer(self.options.optimizer, self.options.optimizer_args, start.roles[need.name])

    savers = ()

    def memory(self, model: TrainedModel) -> TrainingMemory:
        gradients = 4 * model.trained
        flat = min(max(BUCKET_BYTES, 4 * model.trained_outside), gradients) if model.processes > 1 else 0
        weights, masters = (2, 4) if model.rounded else (4, 0)
        held, state = weights * model.trained + model.frozen_bytes, (masters + self._state_bytes) * model.trained
        return TrainingMemory(weights=held, gradients=gradients + flat, optimizer=state, width=2 if model.rounded else None)

    def start(self, start: BackendStart) -> Backend:
        from rlhf_host.backends.torch_backend import TorchBackend

        return TorchBackend(start, self.options.optimizer, self.options.optimizer_args)
