"""Tokenising of long conversations and texts beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from rlhf_host import Message, NoRoom
from rlhf_host.rollouts import EpisodePolicy, Plan
from rlhf_server.bodies import SHORT

T = TypeVar("T")

COMPOSED = 4
"""Maximum characters that a tokenizer may combine to one before it looks for tokens, as é from e and an accent."""


class Aside:
    """Runs slow work in a thread, one piece after the other: trees and templates are not thread-safe."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._widest: dict[int, int] = {}

    async def run(self, long: bool, work: Callable[[], T]) -> T:
        if not long:
            return work()
        async with self._turn:
            return await asyncio.to_thread(work)

    async def plan(self, policy: EpisodePolicy, messages: Sequence[Message], tools: Any, *, long: bool) -> Plan:
        """Returns where the answer to ``messages`` belongs in the policy's tree.

        Args:
            long: the request was long, whatever its messages are.
        """
        return await self._read(policy, messages, lambda: policy.tree.plan(messages, tools), long)

    async def render(self, policy: EpisodePolicy, messages: Sequence[Message], tools: Any, *, long: bool) -> list[int]:
        """Returns the tokens of a new conversation."""
        return await self._read(policy, messages, lambda: policy.codec.render(messages, tools), long)

    async def _read(self, policy: EpisodePolicy, messages: Sequence[Message], work: Callable[[], T], long: bool) -> T:
        texts = [(str(message["role"]), str(message["content"])) for message in messages]

        def fitting() -> T:
            # Templates leave thoughts out of earlier answers, but nothing that others said.
            self.refuse_unfit(policy, [text for role, text in texts if role != "assistant"])
            return work()

        return await self.run(long or sum(len(text) for _, text in texts) > SHORT, fitting)

    def refuse_unfit(self, policy: EpisodePolicy, texts: Sequence[str]) -> None:
        """Raises ``NoRoom`` for texts that cannot fit, whatever their tokens are: tokenising them would take a hundred times
        their memory.
        """
        if not self.fits("".join(texts), policy.tokenizer, policy.max_tokens):
            raise NoRoom(f"{sum(map(len, texts)):,} characters are more than any tokens that fit could have")

    def fits(self, text: str, tokenizer: Any, max_tokens: int) -> bool:
        """Returns True if this many characters can be so few tokens."""
        if len(text) <= SHORT:
            return True
        if id(tokenizer) not in self._widest:
            self._widest[id(tokenizer)] = max(map(len, tokenizer.get_vocab()))
        return len(text) <= max_tokens * COMPOSED * self._widest[id(tokenizer)]
