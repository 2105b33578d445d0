"""Tasks of an environment of verifiers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from rlhf_host import Task, UserError, hookimpl
from rlhf_plugin_verifiers.process import Place, load_tasks

ROW = "verifiers"
"""Key of the environment's data in the task's metadata."""


class VerifiersTasks:
    """The tasks of an environment of verifiers, unchanged, for the agent of the same name."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        environment: str = Field(description="name of an environment (a taskset) that its Python can import, or a .py file")
        python: str = Field(description="Python of an environment with verifiers")
        args: str = Field("{}", description="the environment's configuration, as JSON: the agent's")
        eval_args: str | None = Field(None, description="configuration for the tasks of evaluation, where it has such")
        size: int | None = Field(None, ge=1, description="so many tasks to train on; default: all")
        eval_size: int | None = Field(
            None, ge=1, description="so many for evaluation: of eval_args, or else those that follow the first size"
        )
        env: list[str] = Field([], description="names of environment variables to pass on")
        start_timeout_s: float = Field(600.0, gt=0, description="deadline for the tasks")

    def __init__(self, options: Options):
        self.options = options
        if options.eval_size is not None and options.size is None and options.eval_args is None:
            raise UserError("--data.verifiers.eval-size needs --data.verifiers.size or --data.verifiers.eval-args")

    @hookimpl
    def load_tasks(self, split: str, seed: int) -> list[Task]:
        options, args, skip, size = self.options, self.options.args, 0, self.options.size
        if split != "train":
            if options.eval_args is None and options.eval_size is None:
                raise UserError(
                    "--data verifiers names no tasks for evaluation: give --data.verifiers.size N with"
                    " --data.verifiers.eval-size M for those that follow the first N, or --data.verifiers.eval-args JSON"
                )
            size = options.eval_size
            skip = options.size or 0 if options.eval_args is None else 0
            args = options.args if options.eval_args is None else options.eval_args
        place = Place("--data.verifiers", options.python, options.environment, args, options.env)
        tasks = [task_of(row) for row in load_tasks(place, skip, size, options.start_timeout_s)]
        if not tasks:
            raise UserError(f"--data.verifiers.environment {options.environment}: it has no tasks for the split {split}")
        return tasks


def task_of(row: Mapping[str, Any]) -> Task:
    """Returns the task. The environment's own prompt is only for logs and for the length of prompts."""
    prompt = row.get("prompt")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
    texts = [{"role": str(one.get("role")), "content": _text(one.get("content"))} for one in messages]
    if row.get("system_prompt"):
        texts.insert(0, {"role": "system", "content": row["system_prompt"]})
    while texts and texts[-1]["role"] != "user":
        texts.pop()
    return Task(texts or [{"role": "user", "content": "(no text)"}], row.get("answer"), {ROW: dict(row)})


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""
