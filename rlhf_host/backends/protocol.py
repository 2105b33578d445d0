"""What the host asks of a backend: backward, one optimizer step, and its state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class StepResult:
    """``grad_norm`` before clipping; ``applied`` is False when it was not finite and the weights were left alone."""

    grad_norm: float
    lr: float
    applied: bool


class Backend(Protocol):
    """Owns one trainable role's optimizer and schedule."""

    model: nn.Module

    def backward(self, loss: Tensor) -> None: ...

    def step(self) -> StepResult: ...

    def discard(self) -> None:
        """Forget the gradients accumulated so far."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
