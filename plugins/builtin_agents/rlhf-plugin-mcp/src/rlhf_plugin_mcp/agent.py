"""The agent ``mcp``."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mcp import MCPError
from pydantic import BaseModel, ConfigDict, Field
from rlhf_plugin_multi_turn.text_calls import read_calls, results, with_tools

from rlhf_host import (
    AgentNeeds,
    Episode,
    EpisodeFailed,
    Message,
    NoRoom,
    Outcome,
    Policy,
    Reply,
    RunContext,
    ToolCall,
    Trajectory,
    UserError,
    hookimpl,
)
from rlhf_plugin_mcp.connection import ServerLost
from rlhf_plugin_mcp.pool import Pool
from rlhf_plugin_mcp.results import NotShown, content_of
from rlhf_plugin_mcp.servers import Server, servers_of

MOST_CALLS = 16
"""Calls of one answer that are made."""


@dataclass(frozen=True, slots=True)
class Offered:
    """A tool and its server."""

    server: Server
    schema: Mapping[str, Any]


class McpAgent:
    """The policy calls tools of MCP servers, sees their results, and answers. An answer without a call ends the episode."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        servers: list[str] = Field([], description="NAME=COMMAND or NAME=URL of each server; {python} is this interpreter")
        config: str | None = Field(None, description="a JSON file with mcpServers, as other programs have")
        tools: list[str] | None = Field(None, description="names of the tools that the policy has; default: all")
        scope: Literal["run", "episode"] = Field("run", description="a server for the run, or a new one for each episode")
        max_turns: int = Field(8, ge=1, description="answers per episode; a call in the last one is not made")
        tool_format: Literal["auto", "native", "text"] = Field(
            "auto",
            description="native: by the chat template; text: tools, calls and results as plain text; auto: native where the"
            " chat template has tools",
        )
        start_timeout_s: float = Field(30.0, gt=0, description="deadline for a server to start and name its tools, in seconds")
        tool_timeout_s: float = Field(30.0, gt=0, description="deadline for one call, in seconds")
        max_tool_chars: int = Field(8000, ge=10, description="longest result; of longer ones, head and tail are kept")
        at_once: int = Field(16, ge=1, description="episodes at the same time")
        env: list[str] = Field([], description="names of environment variables that commands get beside the usual ones")

    def __init__(self, options: Options):
        self.options = options
        self.servers = servers_of(options.servers, options.config, options.env)
        self.native = options.tool_format == "native"
        self._offered: dict[str, Offered] | None = None
        self._shared = Pool(options.start_timeout_s)
        self._listing = asyncio.Lock()

    @hookimpl
    def needs(self) -> AgentNeeds:
        return AgentNeeds(episodes_at_once=self.options.at_once)

    @hookimpl
    async def run_started(self, context: RunContext) -> None:
        if self.options.tool_format == "auto":
            data = context.config.get("data") or {}
            template = str(getattr(context.tokenizer, "chat_template", None) or "")
            self.native = not data.get("template") and "tools" in template and "tool_calls" in template
        try:
            await self.offered()
        except ServerLost as error:
            raise UserError(f"mcp: {error}") from error

    @hookimpl
    async def run_finished(self, outcome: Outcome) -> None:
        await self._shared.close()

    async def offered(self) -> dict[str, Offered]:
        """Returns the tools that the policy has, by name. Raises ``ServerLost``, and ``UserError`` for names that do not fit."""
        async with self._listing:
            if self._offered is None:
                self._offered = await self._listed()
            return self._offered

    async def _listed(self) -> dict[str, Offered]:
        found: dict[str, Offered] = {}
        wanted = self.options.tools
        for server in self.servers:
            tools = await (await self._shared.get(server)).tools()
            for tool in tools:
                if wanted is not None and tool.name not in wanted:
                    continue
                if tool.name in found:
                    other = found[tool.name].server.name
                    raise UserError(
                        f"mcp: {other} and {server.name} both have a tool {tool.name}: name those to use (agent.tools)"
                    )
                function = {"name": tool.name, "description": tool.description or "", "parameters": dict(tool.input_schema)}
                found[tool.name] = Offered(server, {"type": "function", "function": function})
        if missing := [name for name in wanted or () if name not in found]:
            raise UserError(f"mcp: agent.tools: no server has {', '.join(missing)}; there are {', '.join(found) or 'none'}")
        if not found:
            raise UserError("mcp: the servers have no tools")
        if self.options.scope == "episode":
            await self._shared.close()
        return found

    @hookimpl
    async def agent_run(self, episode: Episode, policy: Policy) -> list[Trajectory]:
        pool = self._shared if self.options.scope == "run" else Pool(self.options.start_timeout_s)
        try:
            offered = await self.offered()
            counts = await self._converse(episode, policy, offered, pool)
        except ServerLost as error:
            raise EpisodeFailed(str(error), retryable=True) from error
        finally:
            if pool is not self._shared:
                await pool.close()
        rows = policy.trajectories()
        for row in rows:
            row.metrics = {name: float(counts[name]) for name in ("agent/turns", "agent/malformed_calls", "agent/no_room")}
            for name in (*offered, "unknown"):
                row.metrics |= {f"tools/{name}/{what}": float(counts[f"{name}/{what}"]) for what in ("calls", "errors")}
        return rows

    async def _converse(self, episode: Episode, policy: Policy, offered: Mapping[str, Offered], pool: Pool) -> Counter[str]:
        counts: Counter[str] = Counter()
        schemas = [each.schema for each in offered.values()]
        prompt = episode.task.prompt
        messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*map(dict, prompt)]
        if not self.native:
            messages = with_tools(messages, schemas)
        seen: tuple[str, str] | None = None
        for turn in range(self.options.max_turns):
            try:
                reply = await policy.chat(messages, schemas if self.native else None)
            except NoRoom:
                if not turn:
                    raise
                counts["agent/no_room"] += 1
                break
            except (UserError, EpisodeFailed) as error:
                if seen is None:
                    raise
                raise EpisodeFailed(f"the MCP server {seen[0]}: {seen[1]} gave a picture: {error}") from error
            counts["agent/turns"] += 1
            calls, problems = self._calls(reply)
            counts["agent/malformed_calls"] += len(problems)
            if (not calls and not problems) or turn + 1 == self.options.max_turns:
                break
            given = await asyncio.gather(*(self._called(call, episode, offered, pool, counts) for call in calls[:MOST_CALLS]))
            for call, (_, pictures) in zip(calls, given, strict=False):
                seen = (offered[call.name].server.name, call.name) if pictures else seen
            messages = [*messages, reply.message, *self._told(calls, given, problems)]
        return counts

    def _calls(self, reply: Reply) -> tuple[Sequence[ToolCall], Sequence[str]]:
        return (reply.tool_calls, reply.problems) if self.native else read_calls(reply.content)

    async def _called(
        self,
        call: ToolCall,
        episode: Episode,
        offered: Mapping[str, Offered],
        pool: Pool,
        counts: Counter[str],
    ) -> tuple[str, list[dict[str, Any]]]:
        started = time.monotonic()
        name = call.name if call.name in offered else "unknown"
        counts[f"{name}/calls"] += 1
        pictures: list[dict[str, Any]] = []
        if name == "unknown":
            text = f"Error: there is no tool {call.name!r}; there are {', '.join(offered)}"
        else:
            text, pictures = await self._result(call, offered[name].server, pool)
        counts[f"{name}/errors"] += text.startswith("Error: ")
        told = {"name": call.name, "arguments": dict(call.arguments), "result": text, "pictures": len(pictures)}
        episode.log("tool", **told, s=round(time.monotonic() - started, 4))
        return text, pictures

    async def _result(self, call: ToolCall, server: Server, pool: Pool) -> tuple[str, list[dict[str, Any]]]:
        connection = await pool.get(server)
        try:
            result = await connection.call(call.name, call.arguments, self.options.tool_timeout_s)
            return content_of(result, self.options.max_tool_chars)
        except MCPError as error:
            return f"Error: {error}", []
        except NotShown as error:
            raise EpisodeFailed(f"the MCP server {server.name}: {call.name} gave {error}, which no conversation has") from error

    def _told(
        self, calls: Sequence[ToolCall], given: Sequence[tuple[str, list[dict[str, Any]]]], problems: Sequence[str]
    ) -> list[Message]:
        told: list[Message] = []
        for call, (text, pictures) in zip(calls, given, strict=False):
            content: Any = [*([{"type": "text", "text": text}] if text else []), *pictures] if pictures else text
            if self.native:
                told.append({"role": "tool", "name": call.name, "tool_call_id": call.id, "content": content})
            elif pictures:
                told.append({"role": "user", "content": content})
            else:
                told += results([text])
        if problems:
            told.append({"role": "user", "content": "This tool call cannot be read: " + "; ".join(problems)})
        return told
