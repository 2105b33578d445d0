"""Commands in the policy's answers: calls of a tool, fenced blocks, or single lines."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rlhf_host import Reply

Format = Literal["native", "fence", "line"]
TOOL = "shell"
SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": TOOL,
        "description": "Runs a command with bash. Its exit code and output are returned. Files, the working directory, exported "
        "variables and functions stay for the next command; processes do not.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The command, of one or several lines."}},
            "required": ["command"],
        },
    },
}
HINTS: dict[Format, str] = {
    "native": "",
    "fence": "You work in a shell. To run commands, write them in a block\n```sh\nCOMMANDS\n```\nand stop. Their exit code and"
    " output follow. When the task is done, answer without such a block.\n\n",
    "line": "",
}
_FENCE = re.compile(r"^[ \t]*```[ \t]*(?:sh|bash|shell)[ \t]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
ENDS = ("exit", "")
"""Lines that end an episode."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One command of an answer, or what is wrong with it."""

    command: str
    id: str = ""
    problem: str = ""


def commands(reply: Reply, form: Format) -> Sequence[Asked]:
    """Returns the commands of an answer. None: the policy is done."""
    return READ[form](reply)


def _calls(reply: Reply) -> list[Asked]:
    asked = []
    for call in reply.tool_calls:
        command = call.arguments.get("command")
        if call.name != TOOL:
            asked.append(Asked("", call.id, f"there is no tool {call.name!r}; there is {TOOL}"))
        elif not isinstance(command, str) or len(call.arguments) != 1:
            asked.append(Asked("", call.id, 'wrong arguments: give {"command": TEXT}'))
        else:
            asked.append(Asked(command, call.id))
    return asked


def _blocks(reply: Reply) -> list[Asked]:
    return [Asked(block.strip("\n")) for block in _FENCE.findall(reply.content)]


def _line(reply: Reply) -> list[Asked]:
    lines = [line.strip() for line in reply.content.splitlines()]
    first = next((line for line in lines if line), "").removeprefix("$ ").strip()
    return [] if first in ENDS else [Asked(first)]


READ: dict[Format, Callable[[Reply], list[Asked]]] = {"native": _calls, "fence": _blocks, "line": _line}
