"""A policy server over an engine that answers as a script says."""

from __future__ import annotations

import asyncio

import pytest
from rlhf_authoring import ScriptedEngine
from rlhf_authoring.models import TOOLS_TEMPLATE, byte_tokenizer
from rlhf_server.app import PolicyServer

from rlhf_host import Episode, Sampling, Task
from rlhf_host.data.codec import ChatCodec
from rlhf_host.rollouts import EpisodePolicy
from rlhf_host.rollouts.episode_settings import MOST_TOKENS, EpisodeSettings

RUN = Sampling(max_new_tokens=200, temperature=1.0)


class Stage:
    """An engine, and policies that ask it: a ``PolicyHost``."""

    vocabulary, endpoints = MOST_TOKENS, None

    def __init__(self, say, max_tokens=2000, delay_s=0.0):
        self.tokenizer = byte_tokenizer(TOOLS_TEMPLATE)
        self.codec = ChatCodec(self.tokenizer)
        self.settings = EpisodeSettings(sampling=RUN, max_tokens=max_tokens)
        self.delay_s = delay_s
        end = self.tokenizer.eos_token_id
        self.engine = ScriptedEngine(lambda ids, key: [*self.tokenizer.encode(say(ids), add_special_tokens=False), end])
        self.cancelled = 0
        self.waiting = 0
        self.number = 0

    def frozen_role(self, name, episode):
        raise ValueError(f"no role {name!r} generates here")

    def codec_of(self, task):
        return self.codec

    async def generate(self, ids, sampling, key):
        self.waiting += 1
        try:
            await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.waiting -= 1
        return await self.engine.generate(ids, sampling, key)

    def policy(self):
        self.number += 1
        episode = Episode(f"e{self.number}", "g", Task("q"), seed=self.number)
        return EpisodePolicy(episode, self)


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
