"""One sync as a round: trainer and engines work at the same time, under one deadline; errors name the end that failed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from rlhf_host.distributed.bits import compare_bits
from rlhf_host.errors import LostError, PluginError, RunError, UserError, a
from rlhf_host.protocols import SyncTarget, WeightSource, WeightSync, WeightSyncStart, WeightSyncTraits

TRAINER = "trainer"
BITS = "rlhf_host.distributed.bits"
TAKE_SENT = "rlhf_host.distributed.sync.buckets:take_sent"
GRACE_S = 3.0
"""Seconds that the other ends may take to fail too, once one has failed, so that the culprit can be found."""


class OtherEndGone(RunError):
    """Raised by an end that only noticed the failure of another end."""


class SyncOptions(BaseModel):
    """Options of every way of sending weights."""

    model_config = ConfigDict(extra="forbid")

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="type in which floating-point weights are sent; auto: the type in which they are trained"
    )
    bucket_mb: PositiveInt = Field(256, description="weights gathered and sent at a time, in MB")
    rename: dict[str, str] = Field(
        default_factory=dict, description="the trainer's name → the engine's name: whole names, or prefixes that end in a dot"
    )
    timeout_s: float = Field(600.0, gt=0, description="longest time for one sync")

    def wire(self) -> dict[str, Any]:
        """Returns the arguments that every sender takes."""
        return {
            "bucket_bytes": self.bucket_mb * 2**20,
            "dtype": None if self.dtype == "auto" else self.dtype,
            "rename": self.rename,
        }


class RemoteSync:
    """Frame of a sync to engines with their own weights. A way of sending implements ``transfer`` and ``release``.

    Only engines that are behind get weights, so a run may sync again, under the same version, after an engine was replaced.
    """

    name = ""

    def __init__(self, options: Any):
        self.options = options
        self.targets: list[SyncTarget] = []
        self._held: dict[str, tuple[Any, int]] = {}

    @property
    def traits(self) -> WeightSyncTraits:
        bucket = self.options.bucket_mb * 2**20
        return WeightSyncTraits(in_place=False, rounded=self.options.dtype != "auto", bucket_bytes=bucket)

    def start(self, start: WeightSyncStart) -> WeightSync:
        return self

    async def transfer(self, source: WeightSource, targets: Sequence[SyncTarget], version: int) -> None:
        raise NotImplementedError

    async def release(self) -> None:
        """Frees groups, memory and connections at both ends, also after a failure. May be called any number of times."""

    async def connect(self, targets: Sequence[SyncTarget]) -> None:
        await self.release()
        self.targets = list(targets)

    async def send(self, source: WeightSource, version: int) -> None:
        behind = [target for target in self.targets if not self._holds(target, version)]
        if not behind:
            return
        for target in behind:
            if target.in_place:
                raise UserError(
                    f"engine {target.name} samples from the trainer's own weights: nothing is to be sent; use --sync in_process"
                )
        try:
            kept = await self._kept_bits(behind, version)
            checked = [target for target in behind if None not in kept[target.name]]
            if checked:
                await self.together(f"version {version}", {TRAINER: source.run(f"{BITS}:keep_bits")})
            await self.transfer(source, behind, version)
            if checked:
                sent = (await source.run(f"{BITS}:kept_bits"))[0] or {}
                kept = await self._kept_bits(checked, version)
                for target in checked:
                    for came in kept[target.name]:
                        compare_bits(sent, came or {}, target.name, version)
        except BaseException:
            await self.release()
            raise
        for target in behind:
            target.engine.set_version(version)
            self._held[target.name] = (target.engine, version)

    async def sent(self, source: WeightSource) -> tuple[int, float]:
        counts: list[tuple[int, float]] = await source.run(TAKE_SENT)
        return counts[0]

    async def close(self) -> None:
        await self.release()
        self.targets = []

    async def _kept_bits(self, targets: Sequence[SyncTarget], version: int) -> dict[str, list[dict[str, int] | None]]:
        """Returns what each process of each engine received in its last sync, as ``bits`` has it; None: it keeps nothing of it."""
        return await self.together(f"version {version}", {target.name: ask(target, f"{BITS}:kept_bits") for target in targets})

    def _holds(self, target: SyncTarget, version: int) -> bool:
        engine, held = self._held.get(target.name, (None, -1))
        return engine is target.engine and held == version == target.engine.version

    async def together(self, stage: str, jobs: Mapping[str, Awaitable[Any]]) -> dict[str, Any]:
        """Calls ``together`` with this plugin and its deadline."""
        return await together(f"weight sync {self.name}: {stage}", jobs, self.options.timeout_s)


def wire_types(asked: str | None, kept: Sequence[Any]) -> dict[str, Any]:
    """Returns the types of weights on their way, for ``Wire.from_plain``: those that all engines keep, unless the run asks for
    one.

    Args:
        kept: ``WeightTypes.weight_types`` of each process of the engines.
    """
    first = kept[0] if kept and all(one == kept[0] for one in kept) else None
    dtype, others = first or (None, ())
    return {"asked": asked, "kept": dtype, "others": list(others)}


async def ask(target: SyncTarget, function: str, **arguments: Any) -> list[Any]:
    """Calls ``target.engine.run``; returns its results by rank.

    Raises:
        PluginError: it returned something else than a list.
    """
    results = await target.engine.run(function, **arguments)
    if not isinstance(results, list) or not results:
        raise PluginError(
            f"engine {target.name}: run returned {a(type(results).__name__)}, not a list with one result for each process that"
            " holds weights; an engine of one process returns [result]"
        )
    return results


async def together(stage: str, jobs: Mapping[str, Awaitable[Any]], timeout_s: float) -> dict[str, Any]:
    """Awaits all jobs, which are named by their workers.

    Raises:
        PluginError: an engine does not do what its protocol says.
        RunError: ``stage`` failed; names who failed and how, or who was not done after ``timeout_s``.
    """
    tasks = {name: asyncio.ensure_future(job) for name, job in jobs.items()}
    try:
        await asyncio.wait(tasks.values(), timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        if _failures(tasks):
            await asyncio.wait(tasks.values(), timeout=GRACE_S)
            failed = _failures(tasks)
            for error in failed.values():
                if isinstance(error, PluginError):
                    raise error
            shown = [name for name, error in failed.items() if not isinstance(error, OtherEndGone)] or list(failed)
            reasons = "; ".join(f"{_who(name)}: {_text(failed[name])}" for name in shown)
            # A process that is gone is why the others failed.
            cause = next((error for error in failed.values() if isinstance(error, LostError)), failed[shown[0]])
            raise RunError(f"{stage} failed: {reasons}") from cause
        late = [_who(name) for name, task in tasks.items() if not task.done()]
        if late:
            raise RunError(
                f"{stage} was not done after {timeout_s:g} s: still waiting for {', '.join(late)} (--sync.timeout-s)"
            )
        return {name: task.result() for name, task in tasks.items()}
    finally:
        for task in tasks.values():
            task.cancel()
            if task.done() and not task.cancelled():
                task.exception()  # seen, though perhaps not shown


def _failures(tasks: Mapping[str, asyncio.Future[Any]]) -> dict[str, BaseException]:
    return {name: e for name, task in tasks.items() if task.done() and not task.cancelled() and (e := task.exception())}


def _who(name: str) -> str:
    return "the trainer" if name == TRAINER else f"engine {name}"


def _text(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    kind = "" if isinstance(error, RunError | UserError) else f"{type(error).__name__}: "
    return kind + (lines[0] if lines else "no message")
