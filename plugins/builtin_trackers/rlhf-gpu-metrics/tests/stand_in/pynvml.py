"""NVML for machines without GPUs: two GPUs, with numbers that tests know. ``GPUS`` has their number, or is ``none``."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import NoReturn

NVML_TEMPERATURE_GPU = 0
POWER_W = {0: [100.0, 300.0], 1: [50.0]}
"""GPU → its power at one look after the other; the last one stays."""
SILENT: set[str] = set()
"""Functions that this GPU does not support."""
inits = 0
looks = dict.fromkeys(POWER_W, 0)


class NVMLError(Exception):
    pass


def _refuse(what: str) -> NoReturn:
    raise NVMLError(what)


def nvmlInit() -> None:
    global inits
    if os.environ.get("GPUS") == "none":
        _refuse("NVML Shared Library Not Found")
    inits += 1


def nvmlShutdown() -> None:
    global inits
    inits -= 1


def nvmlDeviceGetCount() -> int:
    return int(os.environ.get("GPUS", "2"))


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    return index


def nvmlDeviceGetUUID(handle: int) -> str:
    return f"GPU-{handle}{handle}{handle}-abc"


def nvmlDeviceGetUtilizationRates(handle: int) -> SimpleNamespace:
    if "utilisation" in SILENT:
        _refuse("Not Supported")
    return SimpleNamespace(gpu=40 + 20 * handle, memory=1)


def nvmlDeviceGetPowerUsage(handle: int) -> int:
    powers = POWER_W[handle]
    looks[handle] += 1
    return int(1000 * powers[min(looks[handle], len(powers)) - 1])


def nvmlDeviceGetMemoryInfo(handle: int) -> SimpleNamespace:
    return SimpleNamespace(used=int(3e9), total=int(80e9))


def nvmlDeviceGetTemperature(handle: int, sensor: int) -> int:
    assert sensor == NVML_TEMPERATURE_GPU
    return 60 + handle
