"""Weights as differences: each sync writes the values that changed since the last one, and every step's weights can be rebuilt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

from rlhf_host import UserError
from rlhf_host.distributed import TRAINER, RemoteSync, ask, wire_types
from rlhf_host.protocols import SyncTarget, WeightSource, WeightSync, WeightSyncStart, WeightSyncTraits
from rlhf_host.runs import RunDirectory

FOLDER = "deltas"
"""Folder of a run's steps, in its directory."""
WRITE, RECEIVE, TYPES = (f"{__name__}.{name}" for name in ("trainer:write", "engine:receive", "engine:weight_types"))


class Delta(RemoteSync):
    """Writes the values that changed since the last version into the run's directory, where every engine reads them. Engines that
    sample from the trainer's own module need none, and the steps are kept.
    """

    name = "delta"

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        keep: bool = Field(True, description="keep every step, for RUN@STEP and rlhf bisect; false: only what engines need")
        whole_every: NonNegativeInt = Field(
            100, description="steps between whole copies, so that few steps are read to rebuild one; 0: none after the first"
        )
        compress: Literal["zlib", "none"] = Field("zlib", description="how changed values are compressed")
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
            "auto",
            description="type in which floating-point weights are sent and kept; auto: the engines', or the trainer's if it is"
            " shorter",
        )
        directory: Path | None = Field(
            None, description="a directory that all machines can see; default: deltas/ in the run's directory"
        )
        bucket_mb: PositiveInt = Field(256, description="weights gathered and loaded at a time, in MB")
        timeout_s: float = Field(600.0, gt=0, description="longest time for one sync")

    def __init__(self, options: Options):
        super().__init__(options)
        self._run: Path | None = None
        self._written: int | None = None
        self._last: dict[str, tuple[Any, int]] = {}
        """Engines by name, each with the version that it got last."""
        self._wires: tuple[list[Any], dict[str, Any]] | None = None
        """Engines, and the types that they agree on."""

    @property
    def traits(self) -> WeightSyncTraits:
        return WeightSyncTraits(rounded=self.options.dtype != "auto", bucket_bytes=self.options.bucket_mb * 2**20)

    def start(self, start: WeightSyncStart) -> WeightSync:
        self._run = start.run_dir
        return self

    async def connect(self, targets: Sequence[SyncTarget]) -> None:
        await super().connect(targets)
        shared = [target.name for target in targets if target.in_place]
        if shared and not self.options.keep:
            raise UserError(
                f"engine {shared[0]} samples from the trainer's own weights, and with sync.keep false weight sync delta would do"
                " nothing: leave --sync out"
            )
        self._directory()  # refused now, not after a step

    async def send(self, source: WeightSource, version: int) -> None:
        if not self.targets or not all(target.in_place for target in self.targets):
            await super().send(source, version)
            return
        await self._write(source, version, self._types([]), whole=False)
        for target in self.targets:
            target.engine.set_version(version)

    async def transfer(self, source: WeightSource, targets: Sequence[SyncTarget], version: int) -> None:
        engines = [target.engine for target in self.targets]
        if self._wires is None or self._wires[0] != engines:
            described = await self.together("connecting", {target.name: ask(target, TYPES) for target in self.targets})
            self._wires = engines, self._types([kept for target in self.targets for kept in described[target.name]])
        behind = any(self._last.get(target.name) != (target.engine, self._written) for target in targets)
        # Without the steps before, what an engine that was started again needs is in no file.
        await self._write(source, version, self._wires[1], whole=behind and not self.options.keep)
        arguments = {"directory": str(self._directory()), "step": version, "bucket_bytes": self.options.bucket_mb * 2**20}
        jobs = {target.name: ask(target, RECEIVE, **arguments) for target in targets}
        await self.together(f"version {version}", jobs)
        self._last |= {target.name: (target.engine, version) for target in targets}

    async def close(self) -> None:
        await super().close()
        self._written, self._wires, self._last = None, None, {}

    async def _write(self, source: WeightSource, version: int, wire: dict[str, Any], *, whole: bool) -> None:
        if self._written == version and not whole:
            return
        options = self.options
        writing = source.run(
            WRITE,
            directory=str(self._directory()),
            step=version,
            wire=wire,
            bucket_bytes=options.bucket_mb * 2**20,
            keep=options.keep,
            whole=whole,
            whole_every=options.whole_every,
            compress=options.compress == "zlib",
            model=self._model(),
            owner=None if self._run is None or options.directory is None else str(self._run.absolute()),
        )
        self._written = None
        await self.together(f"writing version {version}", {TRAINER: writing})
        self._written = version

    def _types(self, kept: Sequence[Any]) -> dict[str, Any]:
        return wire_types(None if self.options.dtype == "auto" else self.options.dtype, kept)

    def _directory(self) -> Path:
        directory: Path | None = self.options.directory or (self._run and self._run / FOLDER)
        if directory is None:
            raise UserError("weight sync delta has no directory: set --sync.directory")
        return directory.expanduser().absolute()

    def _model(self) -> str | None:
        """Returns the directory of the model that the run begins with, if it is one. Raises ``UserError`` for a run that sends an
        adapter, which is no model.
        """
        if self._run is None or not (self._run / "config.yaml").is_file():
            return None
        settings = RunDirectory(self._run).settings
        if self.options.keep and settings["sync"].get("adapter") == "adapter":
            raise UserError("sync delta keeps whole models: leave --sync.adapter out, or set --sync.keep false")
        model = settings["roles"]["actor"].get("model")
        return str(Path(model).absolute()) if model and Path(model).is_dir() else None
