"""The weight syncs between processes: ``broadcast`` over groups of processes, ``ipc`` over memory, ``checkpoint`` over files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveInt

from rlhf_host.distributed.sync.collective import ConnectedOptions, ConnectedSync
from rlhf_host.distributed.sync.remote import TRAINER, RemoteSync, SyncOptions, ask
from rlhf_host.distributed.sync.transfer_plan import Place, Route, plan_transfers
from rlhf_host.errors import RunError, UserError
from rlhf_host.protocols import SyncTarget, WeightSource, WeightSync, WeightSyncStart

SHARDS = "rlhf_host.distributed.sync.weight_files"


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


class Checkpoint(RemoteSync):
    """Writes weights into a directory that engines read. ``version-NNNNNN/`` appears complete or not at all, with sharded
    safetensors and the usual index; every engine reads it.
    """

    name = "checkpoint"

    class Options(SyncOptions):
        directory: Path | None = Field(
            None, description="a directory that all machines can see; default: weights/ in the run's directory"
        )
        keep: PositiveInt = Field(2, description="how many of the newest versions to keep")

    def __init__(self, options: Options):
        super().__init__(options)
        self._directory: Path | None = options.directory
        self._written: int | None = None

    def start(self, start: WeightSyncStart) -> WeightSync:
        if self._directory is None and start.run_dir is not None:
            self._directory = start.run_dir / "weights"
        return self

    async def transfer(self, source: WeightSource, targets: Sequence[SyncTarget], version: int) -> None:
        if self._directory is None:
            raise RunError("weight sync checkpoint has no directory: set --sync.directory")
        directory = str(self._directory.expanduser().absolute())
        # What another run left under this version is not this run's; an engine that came late finds what is.
        written, self._written = self._written, None
        if written != version:
            writing = source.run(
                f"{SHARDS}:write", directory=directory, version=version, keep=self.options.keep, **self.options.wire()
            )
            await self.together(f"writing version {version}", {TRAINER: writing})
        jobs = {target.name: ask(target, f"{SHARDS}:read", directory=directory, version=version) for target in targets}
        await self.together(f"version {version}", jobs)
        self._written = version
