"""Findings of ``rlhf doctor``: one line each, with what to do."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal, TypeAlias

Status: TypeAlias = Literal["ok", "note", "absent", "warning", "problem"]
"""``note``: neither good nor bad; ``absent``: optional and not there; only a ``problem`` makes the exit code 1."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Its fields are the keys of ``--json``."""

    section: str
    name: str
    status: Status
    detail: str = ""
    advice: str = ""
    """Advice, where something is to be done."""


def usable_cores() -> int:
    """Cores that this process may use: affinity and a container's quota counted."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
            quota, period = file.read().split()
        return cores if quota == "max" else max(1, min(cores, round(int(quota) / int(period))))
    except (OSError, ValueError):
        return cores
