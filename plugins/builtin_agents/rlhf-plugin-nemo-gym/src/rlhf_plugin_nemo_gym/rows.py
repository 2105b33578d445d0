"""Rows of an environment: JSON lines, each the body of ``POST /run``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from rlhf_host import Task, UserError, hookimpl

PARAMS = "responses_create_params"


class NemoGymRows:
    """The rows of a NeMo Gym environment, unchanged, for the agent of the same name."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        file: str = Field(description="JSON lines, as the environment has them")
        eval_file: str | None = Field(None, description="rows for evaluation; default: none")
        python: str | None = Field(
            None, description="Python of the environment with nemo-gym: names of files may be relative to that package"
        )

    def __init__(self, options: Options):
        self.options = options

    @hookimpl
    def load_tasks(self, split: str, seed: int) -> list[Task]:
        file = self.options.file if split == "train" else self.options.eval_file
        if file is None:
            return []
        path = located(file, self.options.python)
        if not path.is_file():
            raise UserError(f"nemo_gym: {file}: no such file")
        tasks = [task_of(row, place) for row, place in read_rows(path)]
        if not tasks:
            raise UserError(f"nemo_gym: {path} has no rows")
        return tasks


def located(file: str, python: str | None) -> Path:
    """Returns the path of a file, relative to where the run was started, or in the package of nemo-gym, where Gym itself looks."""
    path = Path(file).expanduser()
    if python is not None and not path.exists() and not path.is_absolute():
        root = Path(python).expanduser().absolute().parent.parent
        inside = next(iter(root.glob(f"lib/python*/site-packages/{file}")), None)
        return inside or path
    return path


def read_rows(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields each row and its place. Raises ``UserError`` for the first that is invalid."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f"{path}:{number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise UserError(f"nemo_gym: {place}: not JSON: {error}") from error
            yield row, place


def task_of(row: Any, place: str) -> Task:
    """Returns a task with the row as its metadata; its prompt is only for logs and for the length of prompts. Raises
    ``UserError``.
    """
    params = row.get(PARAMS) if isinstance(row, dict) else None
    if not isinstance(params, dict) or not isinstance(params.get("input"), str | list):
        raise UserError(f"nemo_gym: {place}: a row of NeMo Gym is an object with {PARAMS}.input, a text or a list")
    return Task(_prompt(params), metadata=row)


def _prompt(params: Mapping[str, Any]) -> list[dict[str, Any]]:
    given = params["input"]
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if params.get("instructions"):
        items = [{"role": "system", "content": params["instructions"]}, *items]
    messages = []
    for item in items:
        if isinstance(item, dict) and item.get("type", "message") == "message" and isinstance(item.get("role"), str):
            role = "system" if item["role"] == "developer" else item["role"]
            messages.append({"role": role, "content": _text(item.get("content"))})
    while messages and (messages[-1]["role"] == "assistant" or not messages[-1]["content"].strip()):
        messages.pop()
    return messages or [{"role": "user", "content": "(no text)"}]


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""
