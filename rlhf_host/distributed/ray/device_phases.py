"""Sharing of devices by workers and engines, which use the memory one after the other."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from rlhf_host.distributed.ray.worker_group import WorkerGroup, wait_all
from rlhf_host.errors import RunError

if TYPE_CHECKING:
    from rlhf_host.distributed.ray.engine_pool import EnginePool


class DevicePhases:
    """Phases of shared devices, for engines with the option ``sleep``:

    | phase | training data of workers | engines |
    |---|---|---|
    | ``train`` | on the device | asleep, without weights where a sync brings all of them |
    | ``send`` | on the device | weights |
    | ``sample`` | in CPU memory | weights, then the cache |

    The methods wait until the switch is done; call them from any thread except the event loop's.
    """

    def __init__(self, engines: Sequence[EnginePool], groups: Sequence[WorkerGroup]):
        self._engines, self._groups = engines, groups
        self._away = False
        self._lock = threading.Lock()
        self.keep = False
        """True while engines will sample again under the weights that they have, so that these must outlast their sleep."""

    def train(self, trainable: bool = True) -> None:
        """Prepares for workers to compute: engines sleep, unless they are working at the moment.

        Args:
            trainable: a trained role will compute. Other roles are always on the device.
        """
        with self._lock:
            self._lull(keep=self.keep)
            if trainable:
                self._move("reload", away=False)

    def back(self) -> None:
        """Prepares for a function beside the trainer's weights, which may be away."""
        if self._away:
            self.train()

    def send(self) -> None:
        """Prepares for sending weights: those of workers and of engines are on the device, and no cache."""
        with self._lock:
            self._lull(keep=False)
            self._move("reload", away=False)
            for pool in self._engines:
                pool.wake_weights()

    def sample(self) -> None:
        """Prepares for engines to compute."""
        with self._lock:
            self._move("offload", away=True)
            for pool in self._engines:
                if not pool.empty:
                    pool.wake()

    @contextlib.asynccontextmanager
    async def restart(self) -> AsyncIterator[None]:
        """Lets an engine start again inside the block, as at the beginning of the run: training data of workers is away."""
        await asyncio.to_thread(self._lock.acquire)
        try:
            await asyncio.to_thread(self._move, "offload", away=True)
            yield
        finally:
            self._lock.release()

    def _lull(self, *, keep: bool) -> None:
        for pool in self._engines:
            with contextlib.suppress(RunError):
                pool.sleep(keep=keep)

    def _move(self, method: str, *, away: bool) -> None:
        if self._away == away:
            return
        calls = [(reference, group.name) for group in self._groups for reference in group.call("of_backends", method)]
        wait_all([reference for reference, _ in calls], *(name for _, name in calls))
        self._away = away
