"""The reward ``file``: a function from a Python file. ``--reward FILE.py:NAME`` stands for it, unless that is a class."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rlhf_host.errors import UserError, a
from rlhf_host.hookspecs import hookimpl
from rlhf_host.plugins.python_files import digest, functions_of, import_file, member
from rlhf_host.plugins.python_objects import has_hooks
from rlhf_host.plugins.reward_functions import FunctionReward
from rlhf_host.records.episodes import Trajectory
from rlhf_host.records.needs import RunContext, ScoreContext

log = logging.getLogger(__name__)


class FileReward:
    """A function of yours, or one written for TRL, verl or OpenRLHF: ``--reward FILE.py:NAME``."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        path: str = Field(description="the Python file")
        function: str | None = Field(None, description="its function; default: the only one that the file defines")
        sha256: str | None = Field(None, description="of the file when the run began; set by the host")

        @model_validator(mode="after")
        def _as_it_is(self) -> FileReward.Options:
            path = Path(self.path).expanduser().absolute()
            self.path = str(path)
            if self.sha256 is None and path.is_file():
                self.sha256 = digest(path)
            return self

    def __init__(self, options: Options):
        module = import_file(options.path, "--reward")
        function, name = None, options.function
        if name is None:
            own = functions_of(module)
            name = "reward_func" if "reward_func" in own else next(iter(own), None)
            if name is None or (len(own) > 1 and name != "reward_func"):
                raise UserError(
                    f"{options.path} defines {', '.join(own) or 'no function'}: say which one judges, as in"
                    f" {Path(options.path).name}:{next(iter(own), 'NAME')}"
                )
        function = member(module, name, "--reward")
        if isinstance(function, type) or not callable(function):
            what = f"{a(type(function).__name__)}, not a function or a class"
            if has_hooks(function):
                what = "a class whose hooks the source does not show: write it at the top level, as class NAME(Base)"
            elif isinstance(function, type):
                mark = ": write it above def score" if hasattr(function, "score") else ""
                what = f"a class that marks no method with @hookimpl{mark}"
            raise UserError(f"{options.path}: {name} is {what}")
        self.options = options
        self._reward = FunctionReward(function, name)

    @hookimpl
    def run_started(self, context: RunContext) -> None:
        if self.options.sha256 != digest(Path(self.options.path)):
            log.warning("the reward file %s has changed since the run began", self.options.path)

    @hookimpl
    def score(self, trajectories: Sequence[Trajectory], context: ScoreContext) -> Any:
        return self._reward.score(trajectories, context)
