"""Blocks of a twin whose forward is compiled: hooks, gradient checkpointing and autocast stay around it, as in the model."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch._dynamo
from torch import nn

from rlhf_host.internals import blocks_of

VERSIONS = 64
"""Compiled versions that the blocks of a kind may have in a process: one for each layout, precision, kind of layer and need of
gradients. Beyond torch's own limit of 8, a pass would end the run.
"""


def compile_blocks(twin: nn.Module, backend: str, mode: str) -> nn.Module:
    """Compiles the forward of a twin's blocks; those of a class share compiled versions. Returns the twin."""
    forwards: dict[type, Callable[..., Any]] = {}
    for block in blocks_of(twin).values():
        kind = type(block)
        if kind not in forwards:
            forwards[kind] = _compiled(kind.forward, backend, mode)
        block.forward = MethodType(forwards[kind], block)
    return twin


def _compiled(plain: Callable[..., Any], backend: str, mode: str) -> Callable[..., Any]:
    """Returns a block's forward that never leaves compiled code: what cannot be traced whole raises an error."""

    @torch.compile(backend=backend, mode=mode, dynamic=True, fullgraph=True)
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return plain(self, *args, **kwargs)  # so torch puts its names into this module, not into that of the model's code

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        limits: Any = torch._dynamo.config  # each thread has its own, and backward passes may compute blocks again in another
        limits.recompile_limit = max(limits.recompile_limit, VERSIONS)
        return run(self, *args, **kwargs)

    return forward
