"""The trackio tracker: metrics, settings and sample trajectories in Trackio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from rlhf_host import Outcome, PluginError, RunContext, Trajectory, hookimpl
from rlhf_host.trackers import numbers, readable, sample_rows

__all__ = ["Trackio"]


class Trackio:
    """Metrics and samples in Trackio, which keeps all projects of a user in one folder. The run's name and id are part of every
    checkpoint, so a resumed run goes on in the same one.
    """

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        project: str = Field("rlhf-host", description="project the run belongs to")
        run_name: str | None = Field(None, description="the run's name; default: that of the run directory")
        group: str | None = Field(None, description="group of runs")
        space_id: str | None = Field(
            None, description="Hugging Face Space to log to, as USER/SPACE; default: TRACKIO_SPACE_ID, else this machine"
        )
        server_url: str | None = Field(
            None,
            description="server of your own to log to, with its write token; default: TRACKIO_SERVER_URL, else this machine",
        )
        every: PositiveInt = Field(10, description="steps between tables of sample trajectories")
        rows: PositiveInt = Field(16, description="trajectories in such a table")

    def __init__(self, options: Options):
        self.options = options
        self._trackio: Any = None
        self._run: Any = None
        self._id: str | None = None
        self._name: str | None = None
        self._tokenizer: Any = None

    @hookimpl
    def run_started(self, context: RunContext) -> None:
        try:
            import trackio
        except ImportError as error:
            message = "tracker 'trackio' needs the package trackio: pip install 'rlhf-tracker-trackio[trackio]'"
            raise PluginError(message) from error
        self._trackio, self._tokenizer = trackio, context.tokenizer
        options = self.options
        name = self._name or options.run_name or (context.run_dir.name if context.run_dir is not None else None)
        try:
            run = trackio.init(
                project=options.project,
                name=name,
                group=options.group,
                space_id=options.space_id,
                server_url=options.server_url,
                config=readable(context.config),
                resume="must" if self._id else "never",
                embed=False,
            )
        except Exception as error:  # of huggingface_hub, of a database, or Trackio's own
            raise PluginError(f"tracker 'trackio' cannot start: {error}") from error
        if self._id not in (None, run.id):
            run.finish()
            raise PluginError(
                f"tracker 'trackio' cannot go on with its run: project {options.project!r} has a newer run of the name {name!r};"
                " rename that one, or go on without: --tracker trackio=none"
            )
        self._run, self._id, self._name = run, run.id, run.name

    @hookimpl
    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._run is not None:
            self._run.log(dict(numbers(metrics)), step=step)

    @hookimpl
    def log_trajectories(self, step: int, split: str, trajectories: Sequence[Trajectory]) -> None:
        options = self.options
        rows = sample_rows(step, split, trajectories, every=options.every, rows=options.rows, tokenizer=self._tokenizer)
        if self._run is not None and rows:
            self._run.log({f"{split}/trajectories": self._trackio.Table(data=rows)}, step=step)

    @hookimpl
    def run_finished(self, outcome: Outcome) -> None:
        if self._run is None:
            return
        if outcome.status != "finished":  # Trackio's runs have no status
            level = self._trackio.AlertLevel.ERROR if outcome.status == "failed" else self._trackio.AlertLevel.WARN
            self._run.alert(f"The run has {_ENDS.get(outcome.status, 'ended')}", outcome.error, level=level, step=outcome.step)
        self._run.finish()
        self._run = None

    @hookimpl
    def state_dict(self) -> dict[str, Any]:
        return {"id": self._id, "name": self._name}

    @hookimpl
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._id, self._name = state["id"], state["name"]


_ENDS = {"failed": "failed", "interrupted": "been interrupted"}
