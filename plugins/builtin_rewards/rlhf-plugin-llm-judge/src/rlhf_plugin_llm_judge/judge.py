"""The judge: a model that is asked once for each text, whatever comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from rlhf_host import Unjudged
from rlhf_plugin_llm_judge.chat_model import ChatModel
from rlhf_plugin_llm_judge.options import ChatOptions

T = TypeVar("T")


class Unreadable(ValueError):
    """What a judge said is no judgement. The text goes on after "the judge". ``again``: it may say something else if asked once
    more.
    """

    def __init__(self, why: str, again: bool = True):
        super().__init__(why)
        self.again = again


class Judge(ChatModel):
    """One judge of one reward.

    Args:
        name: of the reward.
        corrects: asked once more, the judge sees what it said and what was wrong with it.
    """

    def __init__(self, name: str, options: ChatOptions, *, corrects: bool):
        super().__init__(name, options, flags=f"--reward.{name}", who="judge", folder="judgements")
        self.corrects = corrects
        self._open: dict[str, asyncio.Task[Any]] = {}
        """Pending judgements, by the hash of what the judge reads."""

    async def finish(self) -> None:
        for task in self._open.values():
            task.cancel()
        self._open.clear()
        await super().finish()

    def forget(self) -> None:
        self._open.clear()

    async def ask(self, text: str, read: Callable[[str, bool], T], schema: Mapping[str, Any] | None = None) -> T | Unjudged:
        """Returns what ``read`` makes of the judge's words about the text, or why there is no judgement.

        Args:
            read: gets the words, and True if they were cut. Raises ``Unreadable``.
            schema: JSON schema of the answer, for servers that can keep to one.
        """
        digest = self.digest(schema, text)
        if (known := self.known.get(digest)) is not None:
            with suppress(Unreadable):  # written by another version
                value = read(*known)
                self.costs.now.cached += 1
                return value
        self.client()  # forgets what another event loop has left
        if (task := self._open.get(digest)) is None:
            task = self._open[digest] = asyncio.create_task(self._ask_anew(text, digest, read, schema))
        else:
            self.costs.now.cached += 1
        # Of several who wait for the same judgement, one may give up.
        answer: T | Unjudged = await asyncio.shield(task)
        return answer

    async def _ask_anew(
        self, text: str, digest: str, read: Callable[[str, bool], T], schema: Mapping[str, Any] | None
    ) -> T | Unjudged:
        messages = [{"role": "user", "content": text}]
        more: dict[str, Any] = {}
        if schema is not None:
            more["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "judgement", "strict": True, "schema": schema},
            }
        try:
            for _ in range(2):
                said, cut = await self.request(messages, **more)
                try:
                    value = read(said, cut)
                except Unreadable as error:
                    unreadable = error
                    if not error.again:
                        break
                else:
                    self.known.put(digest, said, cut)
                    return value
                if self.corrects:
                    wrong = f"This cannot be used: the judge{unreadable}. Write the JSON object again, and nothing else."
                    messages = [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": wrong}]
            why = str(unreadable)
        except Exception as error:  # a server may answer anything, and the client reads it in many ways
            why = f": {self.failure(error)}"
        finally:
            self._open.pop(digest, None)
        self.costs.now.failed += 1
        return Unjudged(f"the judge{why}")
