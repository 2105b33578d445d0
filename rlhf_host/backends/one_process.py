"""The ranks of a run in one process."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rlhf_host.protocols import Slices


class OneProcess:
    """A group of one process (``protocols.Ranks``)."""

    rank = part = process = 0
    size = parts = processes = 1
    slices: Slices | None = None

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def sum_(self, tensors: list[Tensor]) -> None:
        """Does nothing: each tensor is its own sum."""
