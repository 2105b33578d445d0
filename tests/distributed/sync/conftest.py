"""Two engines in processes of their own, and the ways to them from the trainer's model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_host.distributed.sync.plugin import IPC, Broadcast, Checkpoint
from rlhf_host.protocols import SyncTarget

sys.path.insert(0, str(Path(__file__).parent))  # so that the engines' processes find what they run

from engine_host import EngineProcess

from ...weight_sync.rig import load, models  # noqa: F401

WAYS = {"broadcast": Broadcast, "ipc": IPC, "checkpoint": Checkpoint}


@pytest.fixture(scope="session")
def processes() -> Iterator[list[EngineProcess]]:
    found = [EngineProcess() for _ in range(2)]
    yield found
    for engine in found:
        engine.kill()


@pytest.fixture
def engines(processes: list[EngineProcess]) -> list[EngineProcess]:
    """Alive, whatever became of them in the test before."""
    processes[:] = [engine if engine.process.is_alive() else EngineProcess() for engine in processes]
    return processes


@pytest.fixture
def connect(tmp_path: Path):
    """``connect(way, engines, **options)``: the plugin, connected."""

    async def connected(way: str, engines: list[Any], **options: Any) -> Any:
        given = {"bucket_mb": 1, "timeout_s": 300.0} | ({"directory": tmp_path / "weights"} if way == "checkpoint" else {})
        plugin = WAYS[way](WAYS[way].Options(**(given | options)))
        await plugin.connect([SyncTarget(f"e{number}", engine) for number, engine in enumerate(engines)])
        return plugin

    return connected
