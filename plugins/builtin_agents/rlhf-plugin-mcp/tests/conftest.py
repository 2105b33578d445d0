"""Episodes with tools of real servers, and a policy that says what a test says."""

import asyncio
import atexit
import json
import socket
import subprocess
import sys
import time
from functools import lru_cache
from pathlib import Path

import pytest
from rlhf_authoring import ScriptedEngine
from rlhf_authoring.models import TOOLS_TEMPLATE, byte_tokenizer
from rlhf_plugin_mcp import McpAgent

from rlhf_host import Episode, Sampling, Task
from rlhf_host.distributed import reserved
from rlhf_host.installed import find
from rlhf_host.internals import Episodes, EpisodeSettings, Gate, Loaded, PluginManager, SampledModel
from rlhf_host.settings import RolloutConfig

SERVER = Path(__file__).parent / "server.py"


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture(scope="session")
def stdio():
    """A server as a command."""
    return f"calc={{python}} {SERVER}"


@lru_cache(maxsize=1)
def at_an_address():
    """A server at an address, which ends with the tests: most use it, because a server takes seconds to start."""
    place = reserved("127.0.0.1")
    port = place.getsockname()[1]
    process = subprocess.Popen([sys.executable, SERVER, "streamable-http", str(port)], stderr=subprocess.DEVNULL)
    atexit.register(place.close)
    atexit.register(process.kill)
    until = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return f"calc=http://127.0.0.1:{port}/mcp"
        except OSError:
            assert time.monotonic() < until
            time.sleep(0.1)


@pytest.fixture(scope="session")
def http():
    return at_an_address()


@pytest.fixture
def play():
    """Plays episodes one after the other, each a list of answers: rows or exceptions, with the conversation as ``text``."""

    def run(server, *episodes, native=True, max_tokens=20_000, together=False, **options):
        servers = [server] if isinstance(server, str) else server
        agent = McpAgent(McpAgent.Options(servers=servers, tool_format="native" if native else "text", **options))
        tokenizer = byte_tokenizer(TOOLS_TEMPLATE)
        answers = {f"e{number}": iter(says) for number, says in enumerate(episodes)}

        def script(ids, key):
            said = next(answers[f"e{key[1]}"])
            return [*tokenizer.encode(said, add_special_tokens=False), tokenizer.eos_token_id]

        async def main():
            manager = PluginManager([Loaded("agent", "mcp", find("agent", "mcp"), agent)])
            model = SampledModel(engine=Gate(ScriptedEngine(script)), tokenizer=tokenizer)
            rollout = RolloutConfig(episode_retries=0, episode_timeout_s=100)
            settings = EpisodeSettings(sampling=Sampling(max_new_tokens=2000), max_tokens=max_tokens, rollout=rollout)
            host = Episodes(manager, model, settings)
            playing = [Episode(f"e{number}", "g", Task("What is 1 + 2?"), sample=number) for number in range(len(episodes))]
            rows = []
            try:
                if together:
                    rows = await asyncio.gather(*map(host.play, playing), return_exceptions=True)
                else:
                    for episode in playing:
                        rows += await asyncio.gather(host.play(episode), return_exceptions=True)
            finally:
                await agent.run_finished(None)
                manager.close()
            for row in rows:
                if not isinstance(row, BaseException):
                    row[0].columns = {"text": tokenizer.decode([t for segment in row[0].segments for t in segment.token_ids])}
            return [row if isinstance(row, BaseException) else row[0] for row in rows]

        return asyncio.run(main())

    return run


def text_of(row):
    if isinstance(row, BaseException):
        raise row
    return row.columns["text"]
