"""The swanlab tracker: metrics, settings and sample trajectories in SwanLab."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from rlhf_host import Outcome, PluginError, RunContext, Trajectory, hookimpl
from rlhf_host.trackers import numbers, readable, sample_rows

__all__ = ["SwanLab"]

_STATE = {"finished": "success", "interrupted": "aborted", "failed": "crashed"}


class SwanLab:
    """Metrics and samples in SwanLab. Files go under ``swanlab/`` in the run directory. The run's id is part of every checkpoint,
    so a resumed run goes on in the same one.
    """

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        project: str = Field("rlhf-host", description="project the run belongs to")
        workspace: str | None = Field(None, description="user or organization; default: the account's own")
        run_name: str | None = Field(None, description="the run's name; default: that of the run directory")
        group: str | None = Field(None, description="group of runs")
        tags: list[str] = Field(default_factory=list, description="labels to find the run by")
        mode: Literal["online", "local", "offline", "disabled"] | None = Field(
            None, description="default: SWANLAB_MODE, else online"
        )
        every: PositiveInt = Field(10, description="steps between tables of sample trajectories")
        rows: PositiveInt = Field(16, description="trajectories in such a table")

    def __init__(self, options: Options):
        self.options = options
        self._swanlab: Any = None
        self._run: Any = None
        self._id: str | None = None
        self._tokenizer: Any = None

    @hookimpl
    def run_started(self, context: RunContext) -> None:
        try:
            import swanlab
        except ImportError as error:
            message = "tracker 'swanlab' needs the package swanlab: pip install 'rlhf-tracker-swanlab[swanlab]'"
            raise PluginError(message) from error
        self._swanlab, self._tokenizer = swanlab, context.tokenizer
        options, run_dir = self.options, context.run_dir
        under_run = run_dir is not None and "SWANLAB_LOG_DIR" not in os.environ
        if run_dir is not None:
            run_dir.mkdir(parents=True, exist_ok=True)
        try:
            self._run = swanlab.init(
                project=options.project,
                workspace=options.workspace,
                name=options.run_name or (run_dir.name if run_dir is not None else None),
                group=options.group,
                tags=options.tags or None,
                mode=options.mode,
                log_dir=str(run_dir / "swanlab") if run_dir is not None and under_run else None,
                id=self._id,
                resume="allow" if self._id else None,
                config=readable(context.config),
                # It asks nothing, and its capture of standard output would spoil a progress bar.
                settings=swanlab.Settings(interactive=False, terminal=swanlab.Settings.Terminal(proxy_type="none")),
            )
        except Exception as error:  # of its settings, of requests, of the dashboard it lacks, or SwanLab's own
            advice = "run swanlab login, or use --tracker.swanlab.mode offline"
            raise PluginError(f"tracker 'swanlab' cannot start: {error}; {advice}") from error
        self._id = self._run.id

    @hookimpl
    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._run is not None:
            self._run.log(numbers(metrics), step=step)

    @hookimpl
    def log_trajectories(self, step: int, split: str, trajectories: Sequence[Trajectory]) -> None:
        options = self.options
        rows = sample_rows(step, split, trajectories, every=options.every, rows=options.rows, tokenizer=self._tokenizer)
        if self._run is not None and rows:
            table = self._swanlab.echarts.Table()
            table.add(list(rows[0]), [list(row.values()) for row in rows])
            self._run.log({f"{split}/trajectories": table}, step=step)

    @hookimpl
    def run_finished(self, outcome: Outcome) -> None:
        if self._run is not None:
            state = _STATE.get(outcome.status, "crashed")
            self._run.finish(state=state, error=(outcome.error or outcome.status) if state == "crashed" else None)
            self._run = None

    @hookimpl
    def state_dict(self) -> dict[str, Any]:
        return {"id": self._id}

    @hookimpl
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._id = state["id"]
