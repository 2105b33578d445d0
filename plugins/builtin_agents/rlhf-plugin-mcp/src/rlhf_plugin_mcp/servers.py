"""MCP servers as settings name them: commands, or addresses."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_host import UserError

KEYS = ("type", "transport", "command", "args", "env", "cwd", "url", "headers")
TRANSPORTS = {"stdio": "command", "http": "url", "streamable-http": "url", "streamable_http": "url"}
NAME = re.compile(r"[\w.-]+")
_VARIABLE = re.compile(r"\$\{([^}]*)\}")


@dataclass(frozen=True, slots=True)
class Server:
    """One server: a command with its arguments, which speaks over its standard input and output, or an address."""

    name: str
    command: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    url: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


def servers_of(named: Sequence[str], config: str | None, env: Sequence[str]) -> list[Server]:
    """Returns all servers of a run. Raises ``UserError`` without any, and for one that cannot be read.

    Args:
        named: ``NAME=COMMAND`` or ``NAME=URL``.
        config: a JSON file with ``mcpServers``, as other programs have.
        env: names of environment variables that commands get.
    """
    if unset := [name for name in env if name not in os.environ]:
        raise UserError(f"mcp: agent.env: {', '.join(unset)} is not set in your environment")
    passed = {name: os.environ[name] for name in env}
    servers = [_named(text, passed) for text in named] + (_of_file(config, passed) if config else [])
    if not servers:
        raise UserError("mcp: name servers: --agent.servers NAME=COMMAND or NAME=URL, or --agent.config FILE.json")
    if env and not any(server.command for server in servers):
        raise UserError("mcp: agent.env is for servers that are commands, and there are none")
    for number, server in enumerate(servers):
        if not NAME.fullmatch(server.name) or server.name in {other.name for other in servers[:number]}:
            raise UserError(
                f"mcp: the server name {server.name!r} is empty, has other characters than letters, or is there twice"
            )
    return servers


def _named(text: str, passed: Mapping[str, str]) -> Server:
    name, equals, place = text.partition("=")
    if not equals or not place.strip():
        raise UserError(f"mcp: agent.servers {text!r}: give NAME=COMMAND or NAME=URL")
    if re.match(r"https?://", place):
        return Server(name, url=place)
    try:
        command = shlex.split(place)
    except ValueError as error:
        raise UserError(f"mcp: agent.servers {text!r}: {error}") from error
    return Server(name, _with_python(command), passed)


def _of_file(path: str, passed: Mapping[str, str]) -> list[Server]:
    try:
        given = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
        servers = given["mcpServers"]
        return [_entry(str(name), dict(entry), passed) for name, entry in servers.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f'mcp: agent.config {path}: {type(error).__name__}: {error}; it is {{"mcpServers": {{NAME: {{...}}}}}}'
        ) from error


def _entry(name: str, entry: dict[str, Any], passed: Mapping[str, str]) -> Server:
    if unknown := [key for key in entry if key not in KEYS]:
        raise ValueError(f"{name} has {', '.join(unknown)}; it may have {', '.join(KEYS)}")
    kind = entry.get("type") or entry.get("transport") or ("url" if "url" in entry else "stdio")
    needs = TRANSPORTS.get(kind, "url" if kind == "url" else "")
    if not needs:
        raise ValueError(f"{name}: the transport {kind!r} is not one of {', '.join(TRANSPORTS)}")
    other = {"command": ("url", "headers"), "url": ("command", "args", "env", "cwd")}[needs]
    if needs not in entry or (both := [key for key in other if key in entry]):
        raise ValueError(f"{name} has {', '.join(both) if needs in entry else f'no {needs}'}")
    env, headers = (_texts(entry.get(key, {})) for key in ("env", "headers"))
    if needs == "url":
        return Server(name, url=_filled(entry["url"]), headers=headers)
    args = entry.get("args", [])
    if not isinstance(args, list):
        raise ValueError(f"{name}: args is a {type(args).__name__}; give a list of texts")
    command = _with_python([_filled(each) for each in (entry["command"], *args)])
    return Server(name, command, {**passed, **env}, entry.get("cwd"))


def _texts(given: Any) -> dict[str, str]:
    return {str(name): _filled(value) for name, value in dict(given).items()}


def _filled(given: object) -> str:
    """Returns a text with ``${NAME}`` replaced by these environment variables. Raises ``ValueError`` for one that is not set."""
    text = str(given)
    if unset := [name for name in _VARIABLE.findall(text) if name not in os.environ]:
        raise ValueError(f"${{{unset[0]}}} is not set in your environment")
    return _VARIABLE.sub(lambda found: os.environ[found[1]], text)


def _with_python(command: Sequence[str]) -> tuple[str, ...]:
    return tuple(sys.executable if part == "{python}" else part for part in command)
