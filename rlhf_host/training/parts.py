"""Parts that the loop of a run and its keeper of checkpoints share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlhf_host.config.schema import RunConfig
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.protocols import Runtime
from rlhf_host.records.needs import Needs
from rlhf_host.training.events import EventLoop
from rlhf_host.training.ledger import Ledger
from rlhf_host.training.progress import Progress
from rlhf_host.training.source import Source
from rlhf_host.weight_sync.bring import Bring


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParts:
    config: RunConfig
    manager: PluginManager
    needs: Needs
    runtime: Runtime
    bring: Bring | None
    """``None`` for runs that sample nothing."""
    source: Source
    events: EventLoop
    run_dir: Path
    progress: Progress
    ledger: Ledger
