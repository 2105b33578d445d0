"""The agent ``shell``."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from rlhf_host import Episode, Message, NoRoom, Policy, RunContext, hookimpl
from rlhf_plugin_shell.commands import HINTS, SCHEMA, TOOL, Asked, Format, commands
from rlhf_plugin_shell.outputs import shortened, told
from rlhf_plugin_shell.sandboxed import LOGGED, SandboxAgent, SandboxOptions
from rlhf_plugin_shell.sandboxes import Sandbox
from rlhf_plugin_shell.work import Work

MOST_CALLS = 16
"""Commands of one answer that are run."""


class ShellAgent(SandboxAgent):
    """The policy works in a shell, contained or in a container; the tests of the task's row give the reward."""

    COUNTS = ("turns", "commands", "failed", "late", "malformed", "no_room")

    class Options(SandboxOptions):
        format: Literal["auto", "native", "fence", "line"] = Field(
            "auto",
            description="how commands are written. native: calls of a tool, by the chat template; fence: blocks fenced as sh;"
            " line: the first line of the answer; auto: native where the chat template has tools, else fence",
        )
        max_turns: int = Field(8, ge=1, description="answers per episode; commands of the last one are run, too")
        hint: str | None = Field(None, description="text before the task's prompt; default: how to write a block, for fence")
        max_output_chars: int = Field(4000, ge=10, description="longest output shown; of longer ones, head and tail are kept")

    options: ShellAgent.Options

    def __init__(self, options: Options):
        super().__init__(options)
        self.format: Format = "fence" if options.format == "auto" else options.format

    @hookimpl
    async def run_started(self, context: RunContext) -> None:
        if self.options.format == "auto":
            data = context.config.get("data") or {}
            template = str(getattr(context.tokenizer, "chat_template", None) or "")
            native = not data.get("template") and "tools" in template and "tool_calls" in template
            self.format = "native" if native else "fence"
        await super().run_started(context)

    async def play(self, episode: Episode, policy: Policy, shell: Sandbox, work: Work) -> tuple[Counter[str], str | None]:
        counts: Counter[str] = Counter()
        messages = self._first(episode.task.prompt)
        tools = [SCHEMA] if self.format == "native" else None
        left = work.seconds or float("inf")
        for _ in range(self.options.max_turns):
            try:
                reply = await policy.chat(messages, tools)
            except NoRoom:
                if not counts["turns"]:
                    raise
                counts["no_room"] += 1
                break
            counts["turns"] += 1
            asked = commands(reply, self.format)[:MOST_CALLS]
            counts["malformed"] += len(reply.problems) if tools else 0
            if not asked and not (tools and reply.problems):
                break
            messages = [*messages, reply.message]
            texts = []
            for each in asked:
                started = time.monotonic()
                texts.append(await self._ran(each, episode, shell, work, min(self.options.timeout_s, left), counts))
                left -= time.monotonic() - started
            messages += self._told(asked, texts, reply.problems if tools else ())
            if left <= 0:
                counts["out_of_time"] += 1
                break
        return counts, None

    async def _ran(
        self, asked: Asked, episode: Episode, shell: Sandbox, work: Work, seconds: float, counts: Counter[str]
    ) -> str:
        if asked.problem:
            counts["malformed"] += 1
            return f"Error: {asked.problem}"
        if seconds <= 0:
            return "not run: the time for this task is over"
        counts["commands"] += 1
        try:
            ran = await shell.run(asked.command, seconds, variables=work.variables)
        except ValueError as error:
            counts["malformed"] += 1
            return f"Error: {error}"
        counts["late"] += ran.why == "late"
        counts["failed"] += ran.code != 0
        text = told(ran, seconds, self.options.max_output_chars)
        episode.log("shell", command=shortened(asked.command, LOGGED), result=shortened(text, LOGGED), s=round(ran.seconds, 4))
        return text

    def _first(self, prompt: str | Sequence[Message]) -> list[Message]:
        """Returns the prompt, with the hint before the first text of the user."""
        messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*map(dict, prompt)]
        hint = HINTS[self.format] if self.options.hint is None else self.options.hint
        if not hint:
            return messages
        for message in messages:
            if message["role"] == "user" and isinstance(message["content"], str):
                message["content"] = hint + message["content"]
                return messages
        return [{"role": "user", "content": hint.strip()}, *messages]

    def _told(self, asked: Sequence[Asked], texts: Sequence[str], problems: Sequence[str]) -> list[Message]:
        if self.format != "native":
            return [{"role": "user", "content": "\n\n".join(texts)}]
        seen: list[Message] = [
            {"role": "tool", "name": TOOL, "tool_call_id": each.id, "content": text}
            for each, text in zip(asked, texts, strict=True)
        ]
        if problems:
            seen.append({"role": "user", "content": "This tool call cannot be read: " + "; ".join(problems)})
        return seen
