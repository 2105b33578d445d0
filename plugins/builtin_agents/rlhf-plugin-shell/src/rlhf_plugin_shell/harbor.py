"""The task source ``harbor``: tasks in directories."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from rlhf_host import Task, UserError, hookimpl
from rlhf_plugin_shell.work import DIRECTORY


class HarborTasks:
    """Tasks in directories in Harbor's format, which the agent shell plays."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        path: str = Field(description="a directory with task.toml, or a directory of such directories")
        eval_path: str | None = Field(None, description="the same, with tasks for evaluation")
        environment: Literal["plain", "host"] = Field(
            "plain",
            description="plain: refuse tasks whose Dockerfile runs commands or begins with an image of more than a Linux system;"
            " host: play them with this machine's programs, and run these commands in the task's shell",
        )

    def __init__(self, options: Options):
        self.options = options

    @hookimpl
    def load_tasks(self, split: str, seed: int) -> Sequence[Task]:
        option = "path" if split == "train" else "eval_path"
        path = self.options.path if split == "train" else self.options.eval_path
        if path is None:
            return []
        return [self._task(folder, place) for place, folder in enumerate(task_folders(path, option))]

    def _task(self, folder: Path, place: int) -> Task:
        try:
            prompt = (folder / "instruction.md").read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"harbor: {folder}/instruction.md: {error}") from error
        metadata = {DIRECTORY: {"path": str(folder), "environment": self.options.environment}}
        return Task(prompt, None, metadata, index=place)


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
