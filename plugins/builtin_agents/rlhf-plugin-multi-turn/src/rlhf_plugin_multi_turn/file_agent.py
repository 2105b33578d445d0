"""Choice of the environment in a file, by its form."""

from __future__ import annotations

import hashlib
import inspect
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rlhf_host import Episode, Needs, Policy, Trajectory, UserError, hookimpl, import_file
from rlhf_plugin_multi_turn import openrlhf
from rlhf_plugin_multi_turn.trl import TrlEnvironment

log = logging.getLogger(__name__)

EXECUTOR = "AgentExecutor"
"""Name by which OpenRLHF finds an agent in a file."""
FORMS = (
    "a class with reset(**columns) and tools as methods (TRL), an AgentInstance or AgentExecutor (OpenRLHF), an async function"
    " (episode, policy), or, chosen as FILE.py:NAME, a class with hooks marked @hookimpl"
)


class FileAgent:
    """Your own environment, or one written for TRL or OpenRLHF: ``--agent FILE.py:NAME``."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        path: str = Field(description="the Python file")
        function: str | None = Field(
            None, description="its class or function; default: AgentExecutor, or the only class that the file defines"
        )
        sha256: str | None = Field(None, description="of the file when the run began; set by the host")
        max_turns: int = Field(8, ge=1, description="of TRL's environments: answers per episode")
        tool_format: Literal["auto", "native", "text"] = Field("auto", description="of TRL's environments: as of multi_turn")
        tool_timeout_s: float = Field(30.0, gt=0, description="of TRL's environments: deadline for one call, in seconds")
        max_tool_chars: int = Field(8000, ge=10, description="of TRL's environments: longest result")

        @model_validator(mode="after")
        def _as_it_is(self) -> FileAgent.Options:
            path = Path(self.path).expanduser().absolute()
            self.path = str(path)
            if self.sha256 is None and path.is_file():
                self.sha256 = _digest(path)
            return self

    def __new__(cls, options: Options) -> Any:
        """Returns the plugin that plays this environment: each form has its own hooks."""
        with openrlhf.importable():
            module = import_file(options.path, "--agent")
        if options.sha256 is not None and options.sha256 != (now := _digest(Path(options.path))):
            _say_changed(options.path, now)
        return _playing(_chosen(module, options), options)

    def __init__(self, options: Options):
        """Is never called: ``__new__`` returns an object of another class, whose hooks depend on the file."""

    @hookimpl
    def needs(self) -> Needs:
        """Returns the needs. Every form has this hook, which shows that the class is a plugin."""
        return Needs()


class RunFunction:
    """An async function ``(episode, policy)`` that returns trajectories, or a reward for those of the policy."""

    def __init__(self, function: Callable[[Episode, Policy], Any]):
        self.function = function

    @hookimpl
    def needs(self) -> Needs:
        return Needs(rewards=False)

    @hookimpl
    async def agent_run(self, episode: Episode, policy: Policy) -> list[Trajectory]:
        given = self.function(episode, policy)
        given = await given if inspect.isawaitable(given) else given
        if isinstance(given, list):
            return given
        rows = policy.trajectories()
        for row in rows:
            if row.final and given is not None:
                row.agent_rewards = [None] * (len(row.actions) - 1) + [float(given)]
        return rows


def _playing(chosen: Any, options: FileAgent.Options) -> Any:
    place = f"{options.path}: {getattr(chosen, '__name__', type(chosen).__name__)}"
    if (player := openrlhf.player_of(chosen)) is not None:
        return player
    if isinstance(chosen, type):
        if callable(getattr(chosen, "reset", None)):
            return TrlEnvironment(chosen, options)
    elif callable(chosen):
        names = list(inspect.signature(chosen).parameters)
        if names[:2] == ["episode", "policy"]:
            return RunFunction(chosen)
        if {"base_url", "api_key"} <= set(names):
            name = f"{Path(options.path).name}:{chosen.__name__}"
            raise UserError(f"{place} speaks to a server: --agent openai_agent --agent.function {name}")
    raise UserError(f"{place} is no environment; one is {FORMS}")


def _chosen(module: ModuleType, options: FileAgent.Options) -> Any:
    if options.function is not None:
        if not hasattr(module, options.function):
            raise UserError(f"{options.path} has no {options.function!r}; it has {', '.join(_own(module)) or 'nothing'}")
        return getattr(module, options.function)
    if hasattr(module, EXECUTOR):
        return getattr(module, EXECUTOR)
    own = _own(module)
    classes = [value for value in own.values() if isinstance(value, type)] or list(own.values())
    if len(classes) != 1:
        name = f"{Path(options.path).name}:{next(iter(own), 'NAME')}"
        raise UserError(f"{options.path} defines {', '.join(own) or 'nothing'}: say which one plays, as in {name}")
    return classes[0]


def _own(module: ModuleType) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__ and callable(value)
    }


@cache
def _say_changed(path: str, sha256: str) -> None:
    """Logs it once, although plugins are made for inspection as well as for a run."""
    log.warning("the agent file %s has changed since the run began", path)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
