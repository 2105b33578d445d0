"""The clearml tracker: metrics, settings and sample trajectories in ClearML."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from rlhf_host import Outcome, PluginError, RunContext, Trajectory, hookimpl
from rlhf_host.trackers import numbers, readable, sample_rows

__all__ = ["ClearML"]

_FOLDER = "CLEARML_CACHE_DIR"


class ClearML:
    """Metrics and samples in ClearML. What is logged offline goes under ``clearml/`` in the run directory. The task's id is part of
    every checkpoint, so a resumed run goes on in the same task.
    """

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        project: str = Field("rlhf-host", description="project the run belongs to")
        run_name: str | None = Field(None, description="the task's name; default: that of the run directory")
        tags: list[str] = Field(default_factory=list, description="labels to find the task by")
        mode: Literal["online", "offline"] | None = Field(
            None, description="default: offline if CLEARML_OFFLINE_MODE is 1, else online"
        )
        every: PositiveInt = Field(10, description="steps between tables of sample trajectories")
        rows: PositiveInt = Field(16, description="trajectories in such a table")

    def __init__(self, options: Options):
        self.options = options
        self._task: Any = None
        self._id: str | None = None
        self._tokenizer: Any = None
        self._set_folder = False

    @hookimpl
    def run_started(self, context: RunContext) -> None:
        try:
            from clearml import Task
        except ImportError as error:
            raise PluginError("tracker 'clearml' needs the package clearml: pip install clearml") from error
        self._tokenizer = context.tokenizer
        options, run_dir = self.options, context.run_dir
        try:
            if Task.current_task() is not None:
                raise RuntimeError("this process has a ClearML task already: close it first")
            # Else ClearML forks this process, which has threads by now: both may then wait for each other for ever. Elsewhere than
            # on Linux it reports from a thread as well; its setting is sdk.development.report_use_subprocess.
            Task._report_subprocess_enabled = False
            if options.mode is not None:
                Task.set_offline(options.mode == "offline")
            offline = Task.is_offline()
            if offline and run_dir is not None and _FOLDER not in os.environ:
                os.environ[_FOLDER], self._set_folder = str(run_dir.resolve() / "clearml"), True
            self._task = Task.init(
                project_name=options.project,
                task_name=options.run_name or (run_dir.name if run_dir is not None else "rlhf"),
                tags=options.tags or None,
                # An offline session is a task of its own, which is joined to the first one when it is uploaded.
                reuse_last_task_id=self._id if self._id and not offline else False,
                continue_last_task=0 if self._id and not offline else False,
                auto_connect_arg_parser=False,
                auto_connect_frameworks=False,
                auto_connect_streams=False,
            )
            if not isinstance(self._task, Task):  # a stub that takes everything and logs nothing
                raise RuntimeError("ClearML is not configured on this machine")
            self._task.connect(readable(context.config), name="rlhf")
        except Exception as error:  # of its settings, of requests, or ClearML's own
            self._task = None
            self._release()
            text = " ".join(str(error).split())
            advice = "run clearml-init, or use --tracker.clearml.mode offline"
            raise PluginError(f"tracker 'clearml' cannot start: {text}; {advice}") from error
        if not (self._id and offline):
            self._id = self._task.id

    @hookimpl
    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._task is None:
            return
        logger = self._task.get_logger()
        for name, value in numbers(metrics).items():
            if math.isfinite(value):  # ClearML would show 0
                title, _, series = name.partition("/")
                logger.report_scalar(title or "/", series or title, value, step)

    @hookimpl
    def log_trajectories(self, step: int, split: str, trajectories: Sequence[Trajectory]) -> None:
        options = self.options
        rows = sample_rows(step, split, trajectories, every=options.every, rows=options.rows, tokenizer=self._tokenizer)
        if self._task is not None and rows:
            table = [list(rows[0]), *(list(row.values()) for row in readable(rows))]
            self._task.get_logger().report_table(split, "trajectories", iteration=step, table_plot=table)

    @hookimpl
    def run_finished(self, outcome: Outcome) -> None:
        if self._task is None:
            return
        task, self._task = self._task, None
        try:
            if outcome.status == "failed":
                task.mark_failed(status_reason="failed", status_message=outcome.error, force=True)
            elif outcome.status == "interrupted":
                task.mark_stopped(force=True, status_message="interrupted")
            if outcome.status != "finished" and task.is_offline():  # sessions have no status
                task.add_tags([outcome.status])
            task.close()
        finally:
            self._release()

    def _release(self) -> None:
        if self._set_folder:
            os.environ.pop(_FOLDER, None)
            self._set_folder = False

    @hookimpl
    def state_dict(self) -> dict[str, Any]:
        return {"id": self._id}

    @hookimpl
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._id = state["id"]
