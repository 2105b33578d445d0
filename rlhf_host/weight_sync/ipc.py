"""Weights through shared memory on one machine: CUDA IPC between processes on the same GPU, else main memory."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_host.errors import UserError
from rlhf_host.weight_sync.collective_sync import ConnectedOptions, ConnectedSync
from rlhf_host.weight_sync.transfer_plan import Place, Route, plan_transfers


class IPC(ConnectedSync):
    """Shares memory between trainer and engines on one machine. Every rank packs weights for the engines on its own GPU, which map
    them; engines on other GPUs get them by NCCL, and what neither can do goes through main memory. No bytes cross a socket."""

    name = "ipc"

    class Options(ConnectedOptions):
        pass

    def plan(self, trainer: Sequence[Place], engines: Sequence[Place], names: Sequence[str]) -> Sequence[Route]:
        routes = plan_transfers(trainer, engines, "host")
        for number in (number for route in routes if route.kind != "ipc" for number in route.receivers):
            if engines[number].machine != trainer[0].machine:
                raise UserError(
                    f"engine {names[number]} is not on the trainer's machine, and ipc shares memory: use --sync broadcast"
                )
        return routes
