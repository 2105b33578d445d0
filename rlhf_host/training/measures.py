"""Metrics for tuning a step, beside its times: FLOP/s, weight sync, engines, plugins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlhf_host.errors import blaming
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.protocols import Measured, Runtime, Update
from rlhf_host.training.reduction import reduced
from rlhf_host.weight_sync.bring import Bring


def speed(updates: Sequence[Update], seconds: float) -> dict[str, float]:
    """Returns the speed of a step's updates, given their total time: ``tflops`` per device, and ``mfu`` if the device's peak is
    known.
    """
    flops, devices = sum(update.flops for update in updates), max((update.devices for update in updates), default=0)
    if not devices:
        return {}
    rate, peak = flops / devices / seconds, min(update.peak_flops for update in updates)
    return {"tflops": rate / 1e12} | ({"mfu": rate / peak} if peak else {})


async def of_engines(runtime: Runtime, bring: Bring | None) -> dict[str, float]:
    """Returns the engine's metrics since the last call and, if weights are sent to it, the gigabytes that the trainer sent in
    this time, and per second of sending.
    """
    metrics: dict[str, float] = {}
    if isinstance(engine := runtime.engine, Measured):
        metrics |= {f"engine/{name}": value for name, value in reduced(await engine.metrics()).items()}
    if bring is not None and not all(target.in_place for target in runtime.targets):
        size, seconds = await bring.sent(runtime.source)
        metrics |= {"sync/gb": size / 1e9, "sync/gb_per_s": size / seconds / 1e9} if size else {}
    return metrics


def of_plugins(manager: PluginManager, step: int) -> Iterator[dict[str, float]]:
    """Yields what each plugin measured since it was asked last, by ``ALIAS/NAME``."""
    for key, own in manager.each("step_metrics", step=step):
        with blaming(key, "the metrics of step_metrics"):
            yield {f"{manager.by_key[key].alias}/{name}": value for name, value in reduced(own).items()}
