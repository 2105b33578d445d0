"""The mlflow tracker: metrics, settings and sample trajectories in MLflow."""

from __future__ import annotations

import csv
import io
import itertools
import json
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from rlhf_host import Outcome, PluginError, RunContext, Trajectory, hookimpl
from rlhf_host.trackers import numbers, readable, sample_rows

__all__ = ["MLflow"]

log = logging.getLogger(__name__)

_LONGEST_NAME = 250
_BATCH = 100
"""Parameters that MLflow takes at once; of metrics it takes more."""
_STATUS = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}


class MLflow:
    """Metrics and samples in MLflow. Without a tracking server they go into a database under ``mlflow/`` in the run directory. The
    run's id is part of every checkpoint, so a resumed run goes on in the same one.
    """

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        uri: str | None = Field(
            None, description="tracking server or database; default: MLFLOW_TRACKING_URI, else one in the run directory"
        )
        experiment: str | None = Field(
            None, description="experiment the run belongs to; default: MLFLOW_EXPERIMENT_NAME, else rlhf-host"
        )
        run_name: str | None = Field(None, description="the run's name; default: that of the run directory")
        tags: dict[str, str] = Field(default_factory=dict, description="tags to find the run by, as JSON")
        every: PositiveInt = Field(10, description="steps between tables of sample trajectories")
        rows: PositiveInt = Field(16, description="trajectories in such a table")

    def __init__(self, options: Options):
        self.options = options
        self._client: Any = None
        self._id: str | None = None
        self._tokenizer: Any = None
        self._names: dict[str, str] = {}

    @hookimpl
    def run_started(self, context: RunContext) -> None:
        # Read when it is imported: nothing is sent to MLflow's makers, and its notes do not spoil the progress bar.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
        try:
            import mlflow
        except ImportError as error:
            message = "tracker 'mlflow' needs the package mlflow: pip install 'rlhf-tracker-mlflow[mlflow]'"
            raise PluginError(message) from error
        self._tokenizer = context.tokenizer
        uri = self.options.uri or os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None and context.run_dir is None:
            log.info("mlflow logs nothing: without a run directory it needs --tracker.mlflow.uri")
            return
        folder = None if uri is not None else Path(context.run_dir or "").resolve() / "mlflow"
        try:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
                uri = f"sqlite:///{folder / 'mlflow.db'}"
            client = mlflow.MlflowClient(tracking_uri=uri)
            if self._id is None:
                self._id = self._new_run(client, folder, context)
            else:
                client.update_run(self._id, status="RUNNING")
            self._log_settings(client, self._id, context)
        except Exception as error:  # of requests, of a database, or MLflow's own
            where = f"at {uri}" + (f", or go on with its run {self._id}" if self._id else "")
            raise PluginError(f"tracker 'mlflow' cannot start {where}: {error}; see --tracker.mlflow.uri") from error
        self._client = client

    def _new_run(self, client: Any, folder: Path | None, context: RunContext) -> str:
        from mlflow.tracking.context.registry import resolve_tags  # user, program and commit, as start_run has them

        name = self.options.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "rlhf-host"
        experiment = client.get_experiment_by_name(name)
        if experiment is None:
            place = None if folder is None else (folder / "artifacts").as_uri()
            experiment = client.get_experiment(client.create_experiment(name, artifact_location=place))
        run_name = self.options.run_name or (context.run_dir.name if context.run_dir is not None else None)
        run = client.create_run(experiment.experiment_id, tags=resolve_tags(self.options.tags), run_name=run_name)
        return str(run.info.run_id)

    def _log_settings(self, client: Any, run_id: str, context: RunContext) -> None:
        """Logs the configuration as a file, and as parameters, which MLflow cuts and never changes."""
        from mlflow.entities import Param
        from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH

        config = readable(context.config)
        before = client.get_run(run_id).data.params
        text = json.dumps(config, indent=2, ensure_ascii=False)
        client.log_text(run_id, text, f"config-from-step-{context.resume_step + 1}.json" if before else "config.json")
        values = {name: value[:MAX_PARAM_VAL_LENGTH] for name, value in _unique(_flat(config)).items()}
        changed = sorted(name for name in before.keys() & values if before[name] != values[name])
        if changed:
            log.warning("mlflow keeps the parameters that its run began with, of %s: the file has today's", ", ".join(changed))
        new = [Param(name, value) for name, value in values.items() if name not in before]
        for start in range(0, len(new), _BATCH):
            client.log_batch(run_id, params=new[start : start + _BATCH])

    @hookimpl
    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._client is None:
            return
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        rows = [Metric(self._name(name), value, now, step) for name, value in numbers(metrics).items()]
        for start in range(0, len(rows), _BATCH):
            self._client.log_batch(self._id, metrics=rows[start : start + _BATCH])

    def _name(self, name: str) -> str:
        if name not in self._names:
            self._names[name] = _other_than(self._names.values(), allowed(name))
        return self._names[name]

    @hookimpl
    def log_trajectories(self, step: int, split: str, trajectories: Sequence[Trajectory]) -> None:
        options = self.options
        rows = sample_rows(step, split, trajectories, every=options.every, rows=options.rows, tokenizer=self._tokenizer)
        if self._client is None or not rows:
            return
        table = io.StringIO()
        writer = csv.DictWriter(table, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
        self._client.log_text(self._id, table.getvalue(), f"trajectories/{split}-step-{step:06d}.csv")

    @hookimpl
    def run_finished(self, outcome: Outcome) -> None:
        if self._client is not None:
            if outcome.error:
                self._client.set_tag(self._id, "error", readable(outcome.error)[:5000])
            self._client.set_terminated(self._id, _STATUS.get(outcome.status, "FAILED"))
            self._client = None

    @hookimpl
    def state_dict(self) -> dict[str, Any]:
        return {"id": self._id}

    @hookimpl
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._id = state["id"]


def allowed(name: str) -> str:
    """Returns a name as MLflow takes it: ``pass@1`` as ``pass_at_1``, other characters than letters, digits and ``/_.- :`` as
    ``_``, no empty parts, at most 250 characters.
    """
    text = re.sub(r"[^/\w.\- :]", "_", readable(name).replace("@", "_at_"))
    text = "/".join(part for part in text.split("/") if part.strip("."))
    return text.lstrip(".")[:_LONGEST_NAME].rstrip("/") or "_"


def _other_than(taken: Any, name: str) -> str:
    """Returns the name, with a number if it is taken."""
    others = (f"{name[: _LONGEST_NAME - 10]}_{number}" for number in itertools.count(2))
    return next(text for text in itertools.chain([name], others) if text not in taken)


def _unique(values: Iterator[tuple[str, str]]) -> dict[str, str]:
    named: dict[str, str] = {}
    for name, value in values:
        named[_other_than(named, allowed(name))] = value
    return named


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yields dotted names and texts of nested settings."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}" if name else str(key))
    else:
        yield name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
