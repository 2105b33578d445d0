"""Environments of TRL (``GRPOTrainer(environment_factory=...)``): ``reset``, tools as methods, and perhaps ``get_reward``."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhf_host import Action, Episode, Message, Needs, RunContext, Step, UserError, hookimpl
from rlhf_plugin_multi_turn.agent import MultiTurn
from rlhf_plugin_multi_turn.tools import Tools


@dataclass(slots=True)
class _Playing:
    environment: Any
    state: Any = None
    """State of the conversation."""


class TrlEnvironment:
    """One instance for each episode. Its public methods are tools, except ``reset``, ``get_reward`` and ``close``."""

    def __init__(self, make: Callable[[], Any], options: Any):
        self.make = make
        own = ("reset", "get_reward", "close")
        methods = {name: value for name, value in inspect.getmembers(make, callable) if not name.startswith("_")}
        functions = {name: value for name, value in methods.items() if name not in own}
        same = {name: getattr(options, name) for name in ("max_turns", "tool_format", "tool_timeout_s", "max_tool_chars")}
        self.conversation = MultiTurn(MultiTurn.Options(**same))
        sample = self._made()
        bound = {name: getattr(sample, name) for name in functions}
        self.tools = Tools(bound, options.tool_timeout_s, options.max_tool_chars)
        self.rewards = callable(getattr(make, "get_reward", None))

    def _made(self) -> Any:
        try:
            return self.make()
        except Exception as error:
            raise UserError(f"the environment cannot be made without arguments: {type(error).__name__}: {error}") from error

    @hookimpl
    def needs(self) -> Needs:
        return Needs(rewards=not self.rewards)

    @hookimpl
    def run_started(self, context: RunContext) -> None:
        self.conversation.run_started(context)

    @hookimpl
    async def agent_reset(self, episode: Episode) -> Step:
        environment = await asyncio.to_thread(self.make)
        episode.state = _Playing(environment)
        task = episode.task
        columns = {**task.metadata, "prompt": task.prompt}
        if task.ground_truth is not None:
            columns = {**dict.fromkeys(("label", "answer", "solution", "ground_truth"), task.ground_truth), **columns}
        said = await _called(environment.reset, **_taken(environment.reset, columns))
        playing = episode.state
        step = self.conversation.begin(episode, self.tools.of(environment), _with_text(task.prompt, said))
        playing.state, episode.state = episode.state, playing
        return step

    @hookimpl
    async def agent_step(self, episode: Episode, action: Action) -> Step:
        playing: _Playing = episode.state
        episode.state = playing.state
        try:
            step = await self.conversation.agent_step(episode, action)
        finally:
            episode.state = playing
        if not (step.done and self.rewards):
            return step
        return replace(step, reward=float(await _called(playing.environment.get_reward)))

    @hookimpl
    async def agent_close(self, episode: Episode) -> None:
        if isinstance(episode.state, _Playing) and callable(close := getattr(episode.state.environment, "close", None)):
            await _called(close)


async def _called(function: Callable[..., Any], **arguments: Any) -> Any:
    """Calls the method in a thread, unless it is async."""
    if inspect.iscoroutinefunction(function):
        return await function(**arguments)
    return await asyncio.to_thread(function, **arguments)


def _taken(function: Callable[..., Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the columns that it accepts."""
    parameters = inspect.signature(function).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return dict(columns)
    return {name: value for name, value in columns.items() if name in parameters}


def _with_text(prompt: str | Sequence[Message], said: Any) -> str | Sequence[Message] | None:
    """Returns the prompt; the result of ``reset`` is added to its last user message."""
    if said is None:
        return None
    if isinstance(prompt, str):
        return prompt + str(said)
    messages = [dict(message) for message in prompt]
    last = next((message for message in reversed(messages) if message.get("role") == "user"), None)
    if last is None:
        return [*messages, {"role": "user", "content": str(said)}]
    last["content"] = str(last.get("content") or "") + str(said)
    return messages
