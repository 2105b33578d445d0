"""A policy server over an engine that answers as a script says."""

import asyncio

import pytest

from rlhf_host import Episode, Sampling, Task
from rlhf_host.data.codec import ChatCodec
from rlhf_host.records.episodes import NoRoom
from rlhf_host.rollouts.policy import EpisodePolicy
from rlhf_host.serving.app import PolicyServer
from rlhf_host.testing.engines import ScriptedEngine
from tests.data.conftest import byte_tokenizer
from tests.data.test_codec import QWEN

RUN = Sampling(max_new_tokens=200, temperature=1.0)


class Stage:
    """An engine, and policies that ask it."""

    def __init__(self, say, max_tokens=2000, delay_s=0.0):
        self.tokenizer = byte_tokenizer(QWEN)
        self.codec = ChatCodec(self.tokenizer)
        self.max_tokens, self.delay_s = max_tokens, delay_s
        end = self.tokenizer.eos_token_id
        self.engine = ScriptedEngine(lambda ids, key: [*self.tokenizer.encode(say(ids), add_special_tokens=False), end])
        self.cancelled = 0
        self.waiting = 0
        self.number = 0

    async def ask(self, ids, sampling, key):
        self.waiting += 1
        try:
            await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.waiting -= 1
        return await self.engine.generate(ids, sampling, key)

    def fitting(self, length):
        if length >= self.max_tokens:
            raise NoRoom(f"the prompt has {length} tokens")
        return RUN

    def policy(self):
        self.number += 1
        episode = Episode(f"e{self.number}", "g", Task("q"), seed=self.number)
        return EpisodePolicy(episode, RUN, self.max_tokens, self.codec, self.ask, self.fitting)


@pytest.fixture
def stage():
    return Stage


@pytest.fixture
def serve():
    """``serve(test, stage, ...)`` runs ``await test(server, stage)`` beside the server."""

    def run(test, stage, **settings):
        async def main():
            server = await PolicyServer.start(**settings)
            try:
                return await asyncio.wait_for(test(server, stage), 20)
            finally:
                await server.close()

        return asyncio.run(main())

    return run
