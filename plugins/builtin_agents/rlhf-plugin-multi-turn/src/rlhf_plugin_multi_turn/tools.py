"""Tools: Python functions with their JSON schemas, called with a deadline."""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_host import EpisodeFailed, RunError, UserError
from rlhf_plugin_multi_turn.threads import in_thread

MOST_LATE = 64
"""Maximum number of calls that still run after their deadline."""


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a call: the text for the policy, and the outcome."""

    text: str
    ok: bool
    late: bool
    seconds: float


class Tools:
    """The tools of a run. Raises ``UserError`` for a function without the docstring and types that a schema needs."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]], timeout_s: float, max_chars: int):
        self.functions, self.timeout_s, self.max_chars = dict(functions), timeout_s, max_chars
        self.schemas = [_schema(name, function) for name, function in functions.items()]
        self._late: set[threading.Event] = set()

    def of(self, holder: Any) -> Tools:
        """Returns the same tools as methods of an object, such as an episode's own environment."""
        own = copy.copy(self)
        own.functions = {name: getattr(holder, name) for name in self.functions}
        return own

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Result:
        """Calls a tool. A mistake of the policy or of the tool becomes a text that tells it. Raises ``EpisodeFailed`` if the
        tool does.
        """
        started = time.monotonic()
        late = ok = False
        function = self.functions.get(name)
        if function is None:
            text = f"Error: there is no tool {name!r}; there are {', '.join(self.functions)}"
        elif problem := _misfit(function, arguments):
            text = f"Error: {problem}"
        else:
            deadline = asyncio.timeout(self.timeout_s)
            try:
                async with deadline:
                    value = await self._run(function, arguments)
                text, ok = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str), True
            except EpisodeFailed:
                raise
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                text = f"Error: {type(error).__name__}: {error}"
            except TimeoutError as error:
                late = deadline.expired()
                text = f"Error: {name} took longer than {self.timeout_s:g} s" if late else f"Error: TimeoutError: {error}"
            except Exception as error:
                text = f"Error: {type(error).__name__}: {error}"
        return Result(shortened(text, self.max_chars), ok, late, time.monotonic() - started)

    async def _run(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        if inspect.iscoroutinefunction(function):
            return await function(**arguments)
        done = threading.Event()

        def work() -> Any:
            try:
                return function(**arguments)
            finally:
                done.set()

        try:
            value = await in_thread(work)
        except asyncio.CancelledError:
            self._late.difference_update([one for one in self._late if one.is_set()])
            self._late.add(done)
            if len(self._late) > MOST_LATE:
                raise RunError(f"{len(self._late)} calls of tools still run after their deadline") from None
            raise
        return await value if inspect.isawaitable(value) else value


def shortened(text: str, most: int) -> str:
    """Returns head and tail of a long text, and how much is missing between them."""
    if len(text) <= most:
        return text
    half = max(1, most // 2)
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"


def _schema(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    from transformers.utils import get_json_schema  # importing the plugin must stay light

    try:
        schema: dict[str, Any] = get_json_schema(function)
    except Exception as error:
        why = " ".join(str(error).split())
        raise UserError(
            f"agent.tools: no schema for {name}: {why}; give it types, and a docstring with an Args: section"
        ) from error
    return schema


def _misfit(function: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        return f"wrong arguments: {error}"
    return ""
