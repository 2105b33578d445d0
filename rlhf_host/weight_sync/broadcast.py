"""Weights by broadcast from the trainer to every engine process: with NCCL between GPUs, gloo on CPUs, CUDA IPC on one GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from rlhf_host.weight_sync.collective_sync import ConnectedOptions, ConnectedSync
from rlhf_host.weight_sync.transfer_plan import Place, Route, plan_transfers


class Broadcast(ConnectedSync):
    """Broadcasts weights from the trainer to every engine process. New process groups are made when engines come or go; names,
    shapes and dtypes are sent once per group.
    """

    name = "broadcast"

    class Options(ConnectedOptions):
        backend: Literal["auto", "gloo", "nccl"] = Field(
            "auto", description="auto: nccl between different GPUs, shared memory on one GPU, gloo for the rest"
        )
        address: str | None = Field(
            None, description="address the trainer listens on; default: loopback on one machine, else its network address"
        )

    def plan(self, trainer: Sequence[Place], engines: Sequence[Place], names: Sequence[str]) -> Sequence[Route]:
        backend = self.options.backend
        return plan_transfers(trainer, engines) if backend == "auto" else [Route(backend, 0, tuple(range(len(engines))))]

    def address(self, one_machine: bool) -> str | None:
        return self.options.address or super().address(one_machine)
