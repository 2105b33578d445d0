"""What the policy server costs: many episodes of several calls at once, client and server in one process, an engine without work.

    python benchmarks/policy_server.py [--episodes 500] [--calls 8]

Prints requests per second, and resident memory after each of three rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path

import aiohttp
from rlhf_authoring.engines import ScriptedEngine
from rlhf_authoring.models import tiny_tokenizer
from rlhf_server.app import PolicyServer

from rlhf_host import Episode, Sampling, Task
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.rollouts.episode_settings import EpisodeSettings, SampledModel
from rlhf_host.rollouts.episodes import Episodes
from rlhf_host.rollouts.gate import Gate

CHAT = "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


async def play(server: PolicyServer, episodes: Episodes, number: int, calls: int, http: aiohttp.ClientSession) -> None:
    policy = episodes.policy(Episode(f"e{number}", "g", Task("q"), seed=number))
    session = server.open(policy)
    messages = [{"role": "user", "content": "12+34="}]
    for _ in range(calls):
        async with http.post(f"{session.base_url}/chat/completions", json={"messages": messages}) as response:
            response.raise_for_status()
            said = (await response.json())["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "56+78="}]
    [row] = policy.trajectories()
    assert len(row.actions) == calls
    server.close_session(session)


async def measure(episodes: int, calls: int) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT.replace("<s>", tokenizer.bos_token).replace("</s>", tokenizer.eos_token)
    answer = tokenizer.encode("12+34=46", add_special_tokens=False)
    model = SampledModel(engine=Gate(ScriptedEngine(lambda ids, key: answer)), tokenizer=tokenizer)
    settings = EpisodeSettings(sampling=Sampling(max_new_tokens=64), max_tokens=4096)
    played = Episodes(PluginManager([]), model, settings)
    server = await PolicyServer.start()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        for number in range(3):
            started = time.perf_counter()
            await asyncio.gather(*(play(server, played, one, calls, http) for one in range(episodes)))
            took = time.perf_counter() - started
            print(f"round {number + 1}: {episodes * calls / took:.0f} requests/s, {resident_mb():.0f} MiB resident")
    await server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=500)
    parser.add_argument("--calls", type=int, default=8)
    asked = parser.parse_args()
    asyncio.run(measure(asked.episodes, asked.calls))


if __name__ == "__main__":
    main()
