"""The task source ``harbor``: tasks in directories."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from rlhf_host import Task, UserError, hookimpl
from rlhf_plugin_shell.directory import Place, in_one_line, instruction_in, work_in
from rlhf_plugin_shell.work import DIRECTORY

log = logging.getLogger(__name__)
MOST_NAMED = 5
"""Refused tasks that a message names."""


class HarborTasks:
    """Tasks in directories in Harbor's format, which the agent shell plays."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        directory: str = Field(description="a directory with task.toml, or a directory of such directories")
        eval_directory: str | None = Field(None, description="the same, with tasks for evaluation")
        environment: Place = Field(
            "plain",
            description="plain: refuse tasks whose Dockerfile runs commands or begins with an image of more than a Linux system;"
            " host: play them with this machine's programs, and run these commands in the task's shell; container: with their"
            " images and compose files, for --agent.sandbox docker or podman",
        )

        refused: Literal["stop", "skip"] = Field(
            "stop", description="a task that cannot be played here stops the run, or is left out with a line that says why"
        )

    def __init__(self, options: Options):
        self.options = options

    @hookimpl
    def load_tasks(self, split: str, seed: int) -> Sequence[Task]:
        option = "directory" if split == "train" else "eval_directory"
        path = getattr(self.options, option)
        if path is None:
            raise UserError(f"harbor: evaluation needs tasks of its own: give {option}")
        folders = task_folders(path, option)
        reasons = {folder: reason for folder in folders if (reason := self._misfit(folder))}
        named = "; ".join(f"{folder.name}: {reason}" for folder, reason in list(reasons.items())[:MOST_NAMED])
        if reasons and (self.options.refused == "stop" or len(reasons) == len(folders)):
            raise UserError(
                f"harbor: {len(reasons)} of {len(folders)} tasks of {path} cannot be played here: {named}. Another environment"
                " (host, or container) may play them; refused skip leaves them out"
            )
        if reasons:
            log.warning("harbor: left out %d of %d tasks of %s: %s", len(reasons), len(folders), path, named)
        return [self._task(folder, place) for place, folder in enumerate(f for f in folders if f not in reasons)]

    def _misfit(self, folder: Path) -> str:
        try:
            instruction_in(folder)
            work_in(folder, self.options.environment)
        except (ValueError, OSError) as error:
            return in_one_line(error)
        return ""

    def _task(self, folder: Path, place: int) -> Task:
        metadata = {DIRECTORY: {"path": str(folder), "environment": self.options.environment}}
        return Task(instruction_in(folder), None, metadata, index=place)


def task_folders(path: str, option: str) -> list[Path]:
    """Returns the folders of tasks in a directory, or the directory itself. Raises ``UserError`` without any."""
    top = Path(path).expanduser().resolve()
    if (top / "task.toml").is_file():
        return [top]
    if not top.is_dir():
        raise UserError(f"harbor: {option} {path}: there is no such directory")
    found = sorted(folder.parent for folder in top.glob("*/task.toml"))
    if not found:
        raise UserError(f"harbor: {option} {path}: no directory in it has a task.toml")
    return found
