"""Parts that the loop of a run and its keeper of checkpoints share, the progress of the run among them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_host.config.schema import RunConfig
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.protocols import Runtime, WeightSource
from rlhf_host.records.needs import Needs
from rlhf_host.training.events import EventLoop
from rlhf_host.training.ledger import Ledger
from rlhf_host.training.source import Source
from rlhf_host.weight_sync.bring import Bring


@dataclass(slots=True)
class Progress:
    """Counters and decisions of the loop; a checkpoint keeps them all."""

    step: int = 0
    """Finished steps."""
    version: int = 0
    """Version of the weights."""
    pending: dict[str, float] | None = None
    """Metrics of a finished step that is not logged yet. They are completed by an evaluation if one is due, and logged first."""
    best: dict[str, Any] | None = None
    """``step`` and ``value`` of the best ``checkpoint.best`` so far."""
    rates: dict[str, float] = field(default_factory=dict)
    """Role → the peak learning rate that plugins set."""
    stopped: str | None = None
    """Reason for which a plugin ends the run after this step."""
    begun: int | None = None
    """Step of the checkpoint from which the run was resumed."""

    @property
    def best_step(self) -> int | None:
        return self.best["step"] if self.best else None

    def state_dict(self) -> dict[str, Any]:
        """Returns JSON values, without the step, which is in a checkpoint's name."""
        return {name: getattr(self, name) for name in ("version", "best", "pending", "rates", "stopped")}

    def load_state_dict(self, step: int, state: Mapping[str, Any]) -> None:
        self.step = self.begun = step
        self.version, self.best, self.pending = int(state["version"]), state["best"], state["pending"]
        self.rates, self.stopped = dict(state["rates"]), state["stopped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComponents:
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

    def processes(self) -> dict[str, WeightSource]:
        """Returns what ``RunContext.processes`` does."""
        engines = {f"engine {target.name}": target.engine for target in self.runtime.targets}
        roles = {f"role {name}": engine for name, engine in self.runtime.engines.items() if isinstance(engine, WeightSource)}
        return {"trainer": self.runtime.source, **engines, **roles}
