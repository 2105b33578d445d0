"""An environment in one file: what stands in it becomes settings, the layer of a preset."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from rlhf_host.config.tree import TASKS
from rlhf_host.config.yaml_file import Located, located_by_path
from rlhf_host.errors import UserError, a
from rlhf_host.plugins.python_files import import_file
from rlhf_host.plugins.spellings import ENVIRONMENT, spellings, written_out

PARTS = ("tasks", "rewards", "tools", "agent", "system_prompt", "max_turns", "settings")
"""Keys that a file may have."""


def environment_layer(file: Path, where: str) -> Located:
    """The settings that an environment stands for.

    Args:
        where: what messages call it.

    Raises:
        UserError: a file that cannot be imported, has none of the parts, or one of another type.
    """
    module = import_file(file, where)
    if not any(hasattr(module, part) for part in PARTS[:4]):
        raise UserError(f"{where}: {file} is no environment: it has none of {', '.join(PARTS[:4])}")
    tree: dict[str, Any] = dict(_of_type(module, "settings", dict, where) or {})
    data = _data(module, file, where)
    if (prompt := _of_type(module, "system_prompt", str, where)) is not None:
        data["system_prompt"] = prompt
    if data:
        tree["data"] = {**data, **tree.get("data", {})}
        tree["eval"] = {"data": data, **tree.get("eval", {})}
    if rewards := _rewards(module, file, where):
        tree["reward"] = _over(rewards, tree.get("reward", {}))
    if agent := _agent(module, file, where):
        tree["agent"] = _over(agent, tree.get("agent", {}))
    return located_by_path(tree, where)


def _over(below: Any, above: Any) -> Any:
    """``above``, with what mappings in it leave out taken from ``below``."""
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    return {**below, **{key: _over(below.get(key), value) for key, value in above.items()}}


def _data(module: ModuleType, file: Path, where: str) -> dict[str, Any]:
    tasks = getattr(module, "tasks", None)
    if tasks is None:
        return {}
    if isinstance(tasks, str):
        return {"sources": [{"path": tasks}]}
    if not callable(tasks):
        raise UserError(f"{where}: tasks is a function (split, seed), or the name of data, not a {type(tasks).__name__}")
    path, options = written_out(TASKS, f"{file}:tasks")
    return {"sources": [{"path": path, "name": file.stem, **options}]}


def _rewards(module: ModuleType, file: Path, where: str) -> dict[str, Any]:
    rewards = getattr(module, "rewards", None) or {}
    if not isinstance(rewards, Mapping):
        rewards = dict.fromkeys(rewards if isinstance(rewards, list | tuple) else [rewards], 1.0)
    chosen = {}
    for function, weight in rewards.items():
        name = _name(module, function, "rewards", where)
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise UserError(f"{where}: the weight of {name} is {weight!r}, not a number")
        plugin, options = written_out("reward", f"{file}:{name}")
        chosen[name] = {"name": plugin, **options, "weight": float(weight)}
    return chosen


def _agent(module: ModuleType, file: Path, where: str) -> dict[str, Any]:
    agent, tools = getattr(module, "agent", None), getattr(module, "tools", None)
    turns = _of_type(module, "max_turns", int, where)
    more = {} if turns is None else {"max_turns": turns}
    takes_tools = spellings("agent").get(f"{ENVIRONMENT}tools")
    if agent is not None and tools:
        whose = takes_tools.plugin if takes_tools else "an agent of their own"
        raise UserError(f"{where}: it has tools and an agent; tools are for {whose}, so give one of the two")
    if isinstance(agent, str):
        return {"name": agent, **more}
    if agent is not None:
        plugin, options = written_out("agent", f"{file}:{_name(module, agent, 'agent', where)}")
        return {"name": plugin, **options, **more}
    if tools:
        if takes_tools is None:
            raise UserError(f"{where}: no installed agent takes tools of a file: install one, or give an agent")
        names = [_name(module, tool, "tools", where) for tool in tools]
        return {"name": takes_tools.plugin, takes_tools.options[0]: f"{file}:{','.join(names)}", **more}
    return {}


def _name(module: ModuleType, member: Any, part: str, where: str) -> str:
    """Under which name the file has it."""
    name = member if isinstance(member, str) else next((key for key, own in vars(module).items() if own is member), None)
    name = getattr(member, "__name__", name) if getattr(module, getattr(member, "__name__", ""), None) is member else name
    if name is None or not callable(getattr(module, name, None)):
        raise UserError(f"{where}: {part} has {member!r}, which is no function or class of the file")
    return name


def _of_type(module: ModuleType, part: str, kind: type, where: str) -> Any:
    value = getattr(module, part, None)
    if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
        raise UserError(f"{where}: {part} is {a(type(value).__name__)}, expected {kind.__name__}")
    return value
