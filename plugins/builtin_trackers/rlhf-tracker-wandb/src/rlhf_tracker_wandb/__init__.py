"""The wandb tracker: metrics and sample trajectories in Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from rlhf_host import Outcome, PluginError, RunContext, Trajectory, hookimpl
from rlhf_host.trackers import numbers, readable, sample_rows

__all__ = ["WandB"]


class WandB:
    """Metrics and samples in Weights & Biases. Files go under the run directory. The run's id is part of every checkpoint, so a
    resumed run goes on in the same one: ``load_state_dict`` is called before ``run_started``.
    """

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        project: str = Field("rlhf-host", description="project the run belongs to")
        entity: str | None = Field(None, description="user or team; default: the account's own")
        run_name: str | None = Field(None, description="the run's name; default: that of the run directory")
        group: str | None = Field(None, description="group of runs")
        tags: list[str] = Field(default_factory=list, description="labels to find the run by")
        mode: Literal["online", "offline", "disabled"] | None = Field(None, description="default: WANDB_MODE, else online")
        every: PositiveInt = Field(10, description="steps between tables of sample trajectories")
        rows: PositiveInt = Field(16, description="trajectories in such a table")

    def __init__(self, options: Options):
        self.options = options
        self._wandb: Any = None
        self._run: Any = None
        self._id: str | None = None
        self._tokenizer: Any = None

    @hookimpl
    def run_started(self, context: RunContext) -> None:
        try:
            import wandb
        except ImportError as error:
            raise PluginError("tracker 'wandb' needs the package wandb: pip install wandb") from error
        self._wandb, self._tokenizer = wandb, context.tokenizer
        options = self.options
        run_dir = context.run_dir
        if run_dir is not None:
            run_dir.mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(
                project=options.project,
                entity=options.entity,
                name=options.run_name or (run_dir.name if run_dir is not None else None),
                group=options.group,
                tags=options.tags or None,
                mode=options.mode,
                dir=run_dir,
                id=self._id,
                resume="allow" if self._id else None,
                config=readable(context.config),
                # Its capture of standard output and a progress bar spoil each other.
                settings=wandb.Settings(console="off", quiet=True),
            )
        except wandb.errors.Error as error:
            raise PluginError(f"tracker 'wandb' cannot start: {error}; log in, or use --tracker.wandb.mode offline") from error
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
            table = self._wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
            self._run.log({f"{split}/trajectories": table}, step=step)

    @hookimpl
    def run_finished(self, outcome: Outcome) -> None:
        if self._run is not None:
            self._run.finish(exit_code=0 if outcome.status == "finished" else 1)
            self._run = None

    @hookimpl
    def state_dict(self) -> dict[str, Any]:
        return {"id": self._id}

    @hookimpl
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._id = state["id"]
