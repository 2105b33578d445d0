"""What the host asks of a backend: backward, one optimizer step, its state, and the weights it keeps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor, nn

from rlhf_host.backends.weights import Bucket


@dataclass(frozen=True, slots=True)
class StepResult:
    """``grad_norm`` before clipping; ``applied`` is False when it was not finite and the weights were left alone."""

    grad_norm: float
    lr: float
    applied: bool


class Backend(Protocol):
    """Owns one trainable role's optimizer and schedule. Made as ``Backend(options, model=, role=, total_updates=, ranks=)``.

    With several ranks all but ``backward`` and ``discard`` are collective. A backend that splits each model over neighbouring
    processes says over how many by a static method ``parts(options)``; they are given the same rows.
    """

    model: nn.Module
    even_passes: bool
    """Every rank must run equally many forward and backward passes, because parameters or gradients move in them."""

    def backward(self, loss: Tensor, last: bool = True) -> None:
        """Accumulate. ``loss`` is a share of the whole batch's loss, so gradients sum over passes and ranks.

        Args:
            last: no other backward comes before ``step``.
        """
        ...

    def step(self) -> StepResult: ...

    def discard(self) -> None:
        """Forget the gradients accumulated so far."""
        ...

    def save(self, directory: Path) -> None:
        """Write the optimizer's and schedule's state into a directory that all ranks see."""
        ...

    def load(self, directory: Path) -> None: ...

    def save_model(self, directory: Path) -> None:
        """Write the model in Hugging Face format."""
        ...

    def gathered(self, bucket_bytes: int) -> Iterator[Bucket]:
        """All weights, a bucket at a time; whole on rank 0, perhaps empty on others."""
        ...
