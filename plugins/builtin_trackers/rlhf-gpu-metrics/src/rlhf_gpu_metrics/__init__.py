"""The extension gpu_metrics: what NVML says of each GPU, as metrics of every step."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from rlhf_host import Batch, Experience, Metric, Outcome, Outputs, RunContext, UserError, hookimpl

if TYPE_CHECKING:
    from rlhf_gpu_metrics.machines import Machines
    from rlhf_gpu_metrics.watch import Watch

__all__ = ["GPUMetrics"]


class GPUMetrics:
    """Utilisation, power, memory and temperature of every GPU in each step's metrics, from NVIDIA's NVML."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        every_s: float = Field(1.0, ge=0.05, description="seconds between two looks at the GPUs")

    def __init__(self, options: Options):
        self.options = options
        self._watch: Watch | Machines | None = None

    @hookimpl
    def check_run(self, config: Mapping[str, Any], tokenizers: Mapping[str, Any]) -> None:
        if _joined(config) is None:
            from rlhf_gpu_metrics.watch import Devices

            Devices(os.environ.get("CUDA_VISIBLE_DEVICES")).close()

    @hookimpl
    async def run_started(self, context: RunContext) -> None:
        from rlhf_gpu_metrics.machines import Machines
        from rlhf_gpu_metrics.watch import Devices, Watch

        if _joined(context.config) is None:
            self._watch = Watch(Devices(os.environ.get("CUDA_VISIBLE_DEVICES")), self.options.every_s)
            return
        self._watch = machines = Machines(self.options.every_s)
        if not await asyncio.to_thread(machines.look):
            raise UserError(f"no machine of the Ray cluster has GPUs that NVML sees: {machines.reasons()}")

    @hookimpl
    def prepare_batch(self, experience: Experience) -> dict[str, float]:
        """Returns what was seen since the last batch: worker hooks make metrics of it."""
        if self._watch is None:
            return {}
        found = self._watch.take()
        use = [value for name, value in found.items() if name.endswith("/utilisation")]
        power = [value for name, value in found.items() if name.endswith("/power_w")]
        found |= {"gpu/utilisation": fmean(use)} if use else {}
        return found | ({"gpu/power_w": sum(power)} if power else {})

    @hookimpl
    def compute_loss(self, outputs: Outputs, batch: Batch) -> Iterator[Metric]:
        """Adds nothing to the loss."""
        for name, value in batch.own.items():
            yield Metric(name, float(value), reduce="max")

    @hookimpl
    def run_finished(self, outcome: Outcome) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None


def _joined(config: Mapping[str, Any]) -> str | None:
    """Returns the address of the Ray cluster that the run joins; None if all its devices are in this machine."""
    runtime = config.get("runtime") or {}
    return runtime.get("address") if runtime.get("name") == "ray" else None
