"""Weights through shared memory on one machine: CUDA IPC between processes on the same GPU, else main memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_host.errors import UserError
from rlhf_host.weight_sync.collective_sync import ConnectedSync
from rlhf_host.weight_sync.remote_sync import SyncOptions


class IPC(ConnectedSync):
    """Shares memory between trainer and engines on one machine. The trainer packs it and engines map it: no bytes cross a
    socket."""

    name = "ipc"
    module = "rlhf_host.weight_sync.shared_memory"

    class Options(SyncOptions):
        pass

    def choose(self, ends: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        trainer, *engines = ends
        for target, engine in zip(self._members, engines, strict=True):
            if engine["machine"] != trainer["machine"]:
                raise UserError(
                    f"engine {target.name} is not on the trainer's machine, and ipc shares memory: use --sync broadcast"
                )
        cuda = all(end["device"] == "cuda" for end in ends)
        return {"cuda": cuda, "receivers": sum(engine["size"] for engine in engines)}
