"""A model that is not trained, split under FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from rlhf_backend_fsdp import FSDP
from rlhf_backend_fsdp.splitting import gather_no_more, mesh_of, split
from rlhf_host.distributed import run_through
from rlhf_host.protocols import BackendStart, Tensors


class FSDPFrozen:
    """A role's split model. Weights keep their types, so passes compute as they would over the whole model."""

    exact = True

    def __init__(self, options: FSDP.Options, start: BackendStart):
        device = start.device or next(start.model.parameters()).device
        mesh = mesh_of(device, start.ranks, options.shard)
        more: Any = {"offload": options.offload == "cpu", "expert_parallel": options.expert_parallel}
        self._passes, _ = split(start, mesh, "fp32", device, **more)

    def run_pass(self, compute: Callable[..., Tensors], *inputs: Tensor) -> Tensors:
        results = run_through(self._passes, compute, *inputs)
        gather_no_more(self._passes)
        return results

    def run_head(self, compute: Callable[..., Tensors], *inputs: Tensor) -> Tensors:
        return compute(*inputs)
