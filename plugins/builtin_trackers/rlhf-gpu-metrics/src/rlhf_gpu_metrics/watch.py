"""The GPUs of this machine, looked at by a thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from rlhf_host import UserError

log = logging.getLogger(__name__)

MEANS, MOST = ("utilisation", "power_w"), ("memory_gb", "temperature_c")
"""Of what was seen since the last step: the mean, and the largest."""


class Devices:
    """The GPUs that NVML shows to this process.

    Args:
        visible: as ``CUDA_VISIBLE_DEVICES``; None: all of the machine.

    Raises:
        UserError: there is no NVML, or no GPU.
    """

    def __init__(self, visible: str | None = None):
        try:
            import pynvml
        except ImportError as error:
            raise UserError("gpu_metrics needs the package nvidia-ml-py: pip install nvidia-ml-py") from error
        self._nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise UserError(
                f"there is no NVML here, which comes with NVIDIA's driver ({error}): leave out --with gpu_metrics"
                " on a machine without NVIDIA GPUs"
            ) from error
        try:
            self.handles = _chosen(pynvml, visible)
            if not self.handles:
                shown = "" if visible is None else f" with CUDA_VISIBLE_DEVICES={visible}"
                raise UserError(f"NVML sees no GPU here{shown}: leave out --with gpu_metrics")
        except BaseException:
            self.close()
            raise
        self._silent: set[tuple[str, str]] = set()

    def read(self) -> dict[tuple[str, str], float]:
        """Returns (device, quantity) → value. What a device does not say is left out, which is logged once."""
        nvml = self._nvml
        readers: dict[str, Callable[[Any], float]] = {
            "utilisation": lambda handle: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            "power_w": lambda handle: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "memory_gb": lambda handle: nvml.nvmlDeviceGetMemoryInfo(handle).used / 1e9,
            "temperature_c": lambda handle: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        }
        values = {}
        for device, handle in self.handles.items():
            for quantity, read in readers.items():
                try:
                    values[device, quantity] = read(handle)
                except nvml.NVMLError as error:
                    if (device, quantity) not in self._silent:
                        self._silent.add((device, quantity))
                        log.warning("gpu_metrics: GPU %s does not say its %s: %s", device, quantity, error)
        return values

    def close(self) -> None:
        self._nvml.nvmlShutdown()


def _chosen(nvml: Any, visible: str | None) -> dict[str, Any]:
    """Returns name → handle, in NVML's order, of the GPUs that ``CUDA_VISIBLE_DEVICES`` names."""
    handles = {str(index): nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())}
    if visible is None:
        return handles
    named: Sequence[str] = [text.strip() for text in visible.split(",")]
    if any(text.startswith("MIG-") for text in named):
        raise UserError("NVML has no utilisation and power of parts of a GPU (MIG): leave out --with gpu_metrics")
    uuids = {index: _uuid(nvml, handle) for index, handle in handles.items()}
    return {
        index: handle
        for index, handle in handles.items()
        if any(text == index or (text.startswith("GPU-") and uuids[index].startswith(text)) for text in named)
    }


def _uuid(nvml: Any, handle: Any) -> str:
    uuid = nvml.nvmlDeviceGetUUID(handle)
    return uuid.decode() if isinstance(uuid, bytes) else str(uuid)


class Watch:
    """A thread that looks at devices every ``every_s`` seconds."""

    def __init__(self, devices: Devices, every_s: float):
        self._devices, self._every_s = devices, every_s
        self._lock, self._over = threading.Lock(), threading.Event()
        self._seen: dict[tuple[str, str], list[float]] = {}
        self._look()
        self._thread = threading.Thread(target=self._run, daemon=True, name="gpu_metrics")
        self._thread.start()

    def take(self, prefix: str = "") -> dict[str, float]:
        """Returns metric → value since the last call.

        Args:
            prefix: text before the number of each device.
        """
        with self._lock:
            seen, self._seen = self._seen, {}
        if not seen:  # a short step
            self._look()
            with self._lock:
                seen, self._seen = self._seen, {}
        return {
            f"gpu/{prefix}{device}/{quantity}": max(values) if quantity in MOST else sum(values) / len(values)
            for (device, quantity), values in seen.items()
        }

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._devices.close()

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            self._look()

    def _look(self) -> None:
        values = self._devices.read()
        with self._lock:
            for key, value in values.items():
                self._seen.setdefault(key, []).append(value)
