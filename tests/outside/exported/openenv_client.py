"""Plays an exported environment with OpenEnv's own clients, and prints what they saw as JSON."""

import asyncio
import json
import sys

from openenv.core import GenericEnvClient
from openenv.core.mcp_client import MCPToolClient


async def main(url):
    told = {}
    async with GenericEnvClient(base_url=url) as env:
        first = await env.reset(task=4, seed=1)
        wrong = await env.step({"message": "7"})
        right = await env.step({"message": "2"})
        told["turns"] = [first.observation["text"], wrong.observation["text"], right.reward, right.done]
        try:
            await env.step({"message": "2"})
        except RuntimeError as error:
            told["over"] = str(error)

    async def one(number):
        async with GenericEnvClient(base_url=url) as env:
            await env.reset(task=number % 9)
            if number % 2:
                await env.step({"message": "no"})
            return (await env.step({"message": str(number % 9 // 3 + number % 3)})).reward

    told["fifty"] = await asyncio.gather(*(one(number) for number in range(50)))
    print(json.dumps(told))


async def tools(url):
    async with MCPToolClient(base_url=url) as env:
        await env.reset(task=4)
        names = [tool.name for tool in await env.list_tools()]
        print(json.dumps([names, await env.call_tool("add", a=1, b=1)]))


asyncio.run({"play": main, "tools": tools}[sys.argv[2]](sys.argv[1]))
