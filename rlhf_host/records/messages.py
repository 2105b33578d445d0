"""Answers of a policy, read as chat messages. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlhf_host.records.episodes import FinishReason, Message


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""
    """Unique in the run; the message with the result names it as ``tool_call_id``."""


@dataclass(slots=True)
class Reply:
    """One turn of the policy, without special tokens."""

    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: FinishReason = "stop"
    problems: tuple[str, ...] = ()
    """Parts that could not be read, such as calls that are not JSON; their text is then in ``content``."""
    call_id: str = ""
    """Id of the call of the episode that it answers."""

    @property
    def message(self) -> Message:
        """The message to append to a conversation. It has no reasoning: the next prompt has the sampled tokens themselves."""
        said: Message = {"role": "assistant", "content": self.content}
        if self.tool_calls:
            calls = [{"id": call.id, "type": "function", "function": _function(call)} for call in self.tool_calls]
            said["tool_calls"] = calls
        return said


def _function(call: ToolCall) -> dict[str, Any]:
    return {"name": call.name, "arguments": dict(call.arguments)}
