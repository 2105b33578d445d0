"""Weights by broadcast from the trainer's rank 0 to every engine process, with gloo on CPUs and NCCL between GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from rlhf_host.weight_sync.collective_sync import LOOPBACK, ConnectedSync
from rlhf_host.weight_sync.remote_sync import SyncOptions


class Broadcast(ConnectedSync):
    """Broadcasts weights from the trainer to every engine process. A new process group is made when engines come or go; names,
    shapes and dtypes are sent once per group.
    """

    name = "broadcast"
    module = "rlhf_host.weight_sync.process_group"

    class Options(SyncOptions):
        backend: Literal["auto", "gloo", "nccl"] = Field(
            "auto", description="auto: nccl if trainer and engines are all on different GPUs, else gloo"
        )
        address: str | None = Field(
            None, description="address the trainer listens on; default: loopback on one machine, else its network address"
        )

    def choose(self, ends: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        backend = self.options.backend
        if backend == "auto":
            gpus = [end["gpu"] for end in ends]
            backend = "nccl" if None not in gpus and len(set(gpus)) == len(gpus) else "gloo"
        return {"backend": backend, "size": 1 + sum(engine["size"] for engine in ends[1:])}

    def address(self, ends: Sequence[Mapping[str, Any]]) -> str | None:
        one_machine = len({end["machine"] for end in ends}) == 1
        return self.options.address or (LOOPBACK if one_machine else None)
