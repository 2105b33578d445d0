"""Weights through a directory that trainer and engines can see. Engines may join late, leave and return."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field, PositiveInt

from rlhf_host.errors import RunError
from rlhf_host.protocols import SyncTarget, WeightSource, WeightSync, WeightSyncStart
from rlhf_host.weight_sync.remote_sync import TRAINER, RemoteSync, SyncOptions, ask

SHARDS = "rlhf_host.weight_sync.weight_files"


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
