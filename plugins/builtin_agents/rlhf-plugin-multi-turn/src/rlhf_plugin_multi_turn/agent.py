"""A conversation in which the policy may call tools."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rlhf_host import Action, Episode, Message, RunContext, Step, ToolCall, hookimpl
from rlhf_plugin_multi_turn.files import functions_of
from rlhf_plugin_multi_turn.text_calls import read_calls, results, with_tools
from rlhf_plugin_multi_turn.tools import Tools


@dataclass(slots=True)
class State:
    """State of one episode."""

    tools: Tools
    turns: int = 0
    counts: Counter[str] = field(default_factory=Counter)


class MultiTurn:
    """The policy calls tools, sees their results, and answers. An answer without a call ends the episode."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        tools: str | None = Field(None, description="FILE.py with the tools' functions, or FILE.py:NAME,NAME")
        max_turns: int = Field(8, ge=1, description="answers per episode; a call in the last one is not run")
        tool_format: Literal["auto", "native", "text"] = Field(
            "auto",
            description="native: by the chat template; text: tools, calls and results as plain text; auto: native where the "
            "chat template has tools",
        )
        tool_timeout_s: float = Field(30.0, gt=0, description="deadline for one call of a tool, in seconds")
        max_tool_chars: int = Field(8000, ge=10, description="longest result; of longer ones, head and tail are kept")
        parallel_tools: bool = Field(True, description="run the calls of one answer side by side; otherwise in their order")
        on_malformed: Literal["tell", "end"] = Field(
            "tell", description="after a call that cannot be read: tell the policy, or end the episode"
        )

    def __init__(self, options: Options):
        self.options = options
        functions = functions_of(options.tools, "agent.tools") if options.tools else {}
        self.tools = Tools(functions, options.tool_timeout_s, options.max_tool_chars)
        self.native = options.tool_format == "native"

    @hookimpl
    def run_started(self, context: RunContext) -> None:
        if self.options.tool_format == "auto":
            data = context.config.get("data") or {}
            template = str(getattr(context.tokenizer, "chat_template", None) or "")
            self.native = not data.get("template") and "tools" in template and "tool_calls" in template

    @hookimpl
    async def agent_reset(self, episode: Episode) -> Step:
        return self.begin(episode, self.tools, None)

    def begin(self, episode: Episode, tools: Tools, prompt: str | Sequence[Message] | None) -> Step:
        """Returns the first observation: the prompt (default: the task's) and the tools."""
        episode.state = State(tools)
        if not tools.schemas:
            return Step(prompt)
        prompt = episode.task.prompt if prompt is None else prompt
        if self.native:
            return Step([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt, tools=tools.schemas)
        return Step(with_tools(prompt, tools.schemas))

    @hookimpl
    async def agent_step(self, episode: Episode, action: Action) -> Step:
        state: State = episode.state
        state.turns += 1
        calls, problems = self._calls(action, state.tools)
        state.counts["malformed_calls"] += len(problems)
        if problems:
            episode.log("malformed", turn=episode.turn, problems=list(problems))
        ended = not calls and (not problems or self.options.on_malformed == "end")
        if ended or state.turns == self.options.max_turns:
            return Step(done=True, metrics=self._metrics(state))
        texts = await self._results(calls, state, episode)
        if self.native:
            seen: list[Message] = [
                {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": text}
                for call, text in zip(calls, texts, strict=True)
            ]
        else:
            seen = results(texts) if texts else []
        if problems:
            told = "This tool call cannot be read: " + "; ".join(problems)
            seen = [*seen, {"role": "user", "content": told}]
        return Step(seen, metrics=self._metrics(state))

    def _calls(self, action: Action, tools: Tools) -> tuple[Sequence[ToolCall], Sequence[str]]:
        if not tools.schemas:
            return (), ()
        if self.native:
            return action.message.tool_calls, action.message.problems
        return read_calls(action.text)

    async def _results(self, calls: Sequence[ToolCall], state: State, episode: Episode) -> list[str]:
        coroutines = [state.tools.call(call.name, call.arguments) for call in calls]
        if self.options.parallel_tools:
            given = await asyncio.gather(*coroutines)
        else:
            given = [await coroutine for coroutine in coroutines]
        for call, result in zip(calls, given, strict=True):
            name = call.name if call.name in state.tools.functions else "unknown"
            state.counts[f"{name}/calls"] += 1
            state.counts[f"{name}/errors"] += not result.ok
            state.counts[f"{name}/timeouts"] += result.late
            told = {"name": call.name, "arguments": call.arguments, "result": result.text, "ok": result.ok}
            episode.log("tool", turn=episode.turn, **told, s=round(result.seconds, 4))
        return [result.text for result in given]

    def _metrics(self, state: State) -> Mapping[str, float]:
        values: dict[str, Any] = {"agent/turns": state.turns, "agent/malformed_calls": state.counts["malformed_calls"]}
        for name in (*state.tools.functions, *(["unknown"] if state.tools.functions else [])):
            values |= {f"tools/{name}/{what}": state.counts[f"{name}/{what}"] for what in ("calls", "errors", "timeouts")}
        return {name: float(value) for name, value in values.items()}
