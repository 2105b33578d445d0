"""Sharing of devices by workers and engines, which use the memory one after the other."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlhf_host.errors import RunError
from rlhf_host.runtimes.worker_group import WorkerGroup, wait_all

if TYPE_CHECKING:
    from rlhf_host.runtimes.engine_pool import EnginePool


class DevicePhases:
    """Phases of shared devices. While engines sample, the training data of workers is in CPU memory; while workers train, the
    engines sleep.

    For engines with the option ``sleep``. The methods wait until the switch is done; call them from any thread except the event
    loop's.
    """

    def __init__(self, engines: EnginePool, groups: Sequence[WorkerGroup]):
        self._engines, self._groups = engines, groups
        self._away = False
        self._lock = threading.Lock()

    def train(self, trainable: bool = True) -> None:
        """Prepares for workers to compute: engines sleep, unless they are working at the moment.

        Args:
            trainable: a trained role will compute. Other roles are always on the device.
        """
        with self._lock:
            with contextlib.suppress(RunError):
                self._engines.sleep()
            if trainable:
                self._move("reload", away=False)

    def sample(self) -> None:
        """Prepares for engines to compute."""
        with self._lock:
            self._move("offload", away=True)
            self._engines.wake()

    def both(self) -> None:
        """Prepares for sending weights: workers and engines are both on the device."""
        with self._lock:
            self._move("reload", away=False)
            self._engines.wake()

    def _move(self, method: str, *, away: bool) -> None:
        if self._away == away:
            return
        calls = [(reference, group.name) for group in self._groups for reference in group.call("of_backends", method)]
        wait_all([reference for reference, _ in calls], *(name for _, name in calls))
        self._away = away
