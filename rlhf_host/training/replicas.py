"""Replicas: copies of a model that share its weights and run forward and backward side by side in threads.

Two replicas of one thread each keep two cores busier than one model on two threads, whose short operators wait for each other.
The autograd engine runs CPU graphs in the thread that called it, without Python's lock.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import nn

from rlhf_host.errors import RunError

T = TypeVar("T")
Plan = list[list[int]]

EXTRA_GRADIENTS = 2**28
"""Numbers that the other replicas' gradients may hold in all (1 GiB)."""


def replica_count(model: nn.Module, wanted: int) -> int:
    """``wanted``, or where that is 0 one per thread as far as memory for gradients goes; always 1 away from the CPU."""
    parameters = list(model.parameters())
    if parameters[0].device.type != "cpu":
        return 1
    if wanted:
        return wanted
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    return min(torch.get_num_threads(), 1 + EXTRA_GRADIENTS // max(1, trained))


class Replicas:
    """``count`` models with the same weights, the first being ``model`` itself; every one has gradients of its own."""

    def __init__(self, model: nn.Module, count: int):
        self.models = [model, *(_replica(model) for _ in range(count - 1))]
        self._threads = max(1, torch.get_num_threads() // count)
        self._pool: ThreadPoolExecutor | None = None

    def __len__(self) -> int:
        return len(self.models)

    def run(self, work: Callable[[Any, Plan], T], plans: Sequence[Plan]) -> list[T]:
        """``work(model, plan)`` for every replica, side by side. The first error is raised, after all have ended."""
        if len(plans) != len(self.models):
            raise RunError(f"{len(plans)} plans for {len(self.models)} replicas")
        if len(self.models) == 1:
            return [work(self.models[0], plans[0])]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(
                len(self.models), "rlhf-replica", initializer=torch.set_num_threads, initargs=(self._threads,)
            )
        futures = [self._pool.submit(work, model, plan) for model, plan in zip(self.models, plans, strict=True)]
        for future in futures:
            future.exception()  # waits
        return [future.result() for future in futures]

    def collect(self) -> None:
        """Sum all gradients into the first model's, in a fixed order."""
        for parameters in zip(*(model.parameters() for model in self.models), strict=True):
            first = parameters[0]
            for other in parameters[1:]:
                if other.grad is None:
                    continue
                if first.grad is None:
                    first.grad = other.grad
                else:
                    first.grad.add_(other.grad)
                other.grad = None

    def discard(self) -> None:
        for model in self.models[1:]:
            model.zero_grad(set_to_none=True)


def _replica(model: nn.Module) -> nn.Module:
    """The modules once more around parameters that share the first ones' storage."""
    shared: dict[int, Any] = {
        id(parameter): nn.Parameter(parameter.data, requires_grad=parameter.requires_grad) for parameter in model.parameters()
    }
    return copy.deepcopy(model, shared)
