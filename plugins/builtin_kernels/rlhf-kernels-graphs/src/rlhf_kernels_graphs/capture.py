"""Capture of a function as a CUDA graph, which replays its launches on the same memory."""

from __future__ import annotations

from collections.abc import Callable

import torch

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Gets a function that reads and writes tensors which stay where they are, and returns a function that does the same."""


def cuda_graph(work: Callable[[], None]) -> Callable[[], None]:
    """Captures ``work``, which must not wait for the device, and has run before: the first call sets things up."""
    graph = torch.cuda.CUDAGraph()
    # Other threads, such as those of a collective, may call CUDA meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    return graph.replay  # type: ignore[no-any-return]


CAPTURES: dict[str, Capture] = {"cuda": cuda_graph}
"""Type of device → how steps are captured on it. Tests add others."""
