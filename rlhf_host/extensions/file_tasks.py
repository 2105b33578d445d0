"""The task source ``file``: a function from a Python file. ``--data FILE.py:NAME`` stands for it, unless that is a class."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from rlhf_host.errors import UserError, a
from rlhf_host.hookspecs import hookimpl
from rlhf_host.plugins.python_files import import_file, member


class FileTasks:
    """A function ``(split, seed)``, or with fewer arguments, that returns tasks: ``--data FILE.py:NAME``."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        file: str = Field(description="the Python file")
        function: str = Field("tasks", description="its function")

        @field_validator("file")
        @classmethod
        def _absolute(cls, file: str) -> str:
            return str(Path(file).expanduser().absolute())

    def __init__(self, options: Options):
        self.function = member(import_file(options.file, "--data"), options.function, "--data")
        if not callable(self.function):
            raise UserError(f"{options.file}: {options.function} is {a(type(self.function).__name__)}, not a function")
        parameters = inspect.signature(self.function).parameters
        self.takes = [name for name in ("split", "seed") if name in parameters]
        if needed := [name for name, one in parameters.items() if one.default is one.empty and name not in self.takes]:
            raise UserError(f"{options.file}: {options.function} takes {', '.join(needed)}; tasks are made of split and seed")

    @hookimpl
    def load_tasks(self, split: str, seed: int) -> Iterable[Any]:
        given = {"split": split, "seed": seed}
        return self.function(**{name: given[name] for name in self.takes})  # type: ignore[no-any-return]
