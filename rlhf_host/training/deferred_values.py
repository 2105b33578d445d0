"""Numbers on devices that are read together: whoever reads one waits until the device has computed everything before it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

Then: TypeAlias = Callable[[list[float]], None]
"""Receives the numbers that were taken with it."""


class DeferredValues:
    """Numbers that passes have computed, and what is to be done with them."""

    def __init__(self) -> None:
        self._taken: list[tuple[Tensor, Then]] = []

    def take(self, numbers: Tensor, then: Then) -> None:
        """Keeps numbers of any shape until ``read``, which calls ``then`` with them as float64."""
        self._taken.append((numbers.detach().flatten().to(torch.float64), then))

    def read(self) -> None:
        """Reads everything that was taken, once per device, and calls each ``then`` in the order of taking. Raises what they
        raise.
        """
        taken, self._taken = self._taken, []
        of_device: dict[torch.device, list[Tensor]] = defaultdict(list)
        for numbers, _ in taken:
            of_device[numbers.device].append(numbers)
        read = {}
        for device, parts in of_device.items():
            read[device] = iter(torch.cat(parts).tolist())
        for numbers, then in taken:
            then([next(read[numbers.device]) for _ in range(numbers.numel())])
