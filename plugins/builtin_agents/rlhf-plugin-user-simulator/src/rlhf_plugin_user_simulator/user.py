"""The user: a frozen role of the run, or a model behind OpenAI's API."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence

from rlhf_plugin_llm_judge.chat_model import ChatModel
from rlhf_plugin_llm_judge.costs import Costs
from rlhf_plugin_llm_judge.options import ChatOptions
from rlhf_plugin_llm_judge.verdict import after_thoughts

from rlhf_host import Episode, EpisodeFailed, NoRoom, Policy

Talk = list[dict[str, str]]
"""A conversation as its user sees it: what it says itself has the role ``assistant``."""


class ServedUser(ChatModel):
    """A user behind OpenAI's API. What it said to a conversation, with a seed, is known from then on."""

    def __init__(self, options: ChatOptions):
        role = ", or let a frozen model of the run play it, --agent.role user"
        super().__init__("user_simulator", options, flags="--agent", who="user", folder="user_messages", otherwise=role)

    async def say(self, talk: Sequence[Mapping[str, str]], seed: int) -> str:
        """Returns the user's next message. Raises ``EpisodeFailed`` if there is none."""
        more = {"seed": seed} if self.options.temperature else {}  # greedy answers are the same for every seed
        digest = self.digest(more, talk)
        if (known := self.known.get(digest)) is not None:
            self.costs.now.cached += 1
            return known[0]
        try:
            said, cut = await self.request(talk, **more)
        except Exception as error:  # a server may answer anything, and the client reads it in many ways
            self.costs.now.failed += 1
            raise EpisodeFailed(f"the user does not answer: {self.failure(error)}") from error
        text = after_thoughts(said).strip()
        if not text:
            self.costs.now.failed += 1
            why = ": max_tokens cut its thoughts" if cut and said else ""
            raise EpisodeFailed(f"the user says nothing{why}")
        self.known.put(digest, text, cut)
        return text


LABELS = {"system": "{}", "user": "The assistant: {}", "assistant": "You: {}"}
"""How the beginning of a conversation is written into one message."""


class RoleUser:
    """A user that is a frozen role of the run, for one episode. It gets the conversation up to its first word as one message, which
    every chat template can express, and texts without one.
    """

    def __init__(self, policy: Policy, costs: Costs, max_tokens: int):
        self._policy, self._costs, self._max_tokens = policy, costs, max_tokens
        self._said = 0

    async def say(self, talk: Sequence[Mapping[str, str]], seed: int) -> str:
        """Returns the user's next message; ``seed`` is the engine's own. Raises ``EpisodeFailed`` if there is none."""
        first = len(talk) - 2 * self._said
        beginning = "\n\n".join(LABELS[message["role"]].format(message["content"]) for message in talk[:first])
        messages = [{"role": "user", "content": beginning}, *(dict(message) for message in talk[first:])]
        began = time.monotonic()
        try:
            reply = await self._policy.chat(messages, max_new_tokens=self._max_tokens)
        except NoRoom as error:
            self._costs.now.failed += 1
            raise EpisodeFailed(f"the user has no room for another message: {error.reason}") from error
        self._costs.now.calls += 1
        self._costs.now.seconds += time.monotonic() - began
        if not (text := reply.content.strip()):
            self._costs.now.failed += 1
            raise EpisodeFailed("the user says nothing")
        self._said += 1
        return text


def seed_of(episode: Episode, turn: int) -> int:
    """Returns a seed of 31 bits for a message. All episodes of a group begin with the same one, so that they can be compared."""
    sample = episode.sample if turn else 0
    digest = hashlib.blake2b(f"{episode.seed}|{sample}|{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 33
