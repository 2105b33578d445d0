"""A small OpenEnv server, with a switch for each way to fail."""

import asyncio
import json
import random

from aiohttp import WSMsgType, web
from rlhf_authoring.served import Served

SCHEMA = {"properties": {"number": {"type": "integer"}, "metadata": {"type": "object"}}, "required": ["number"]}


class Server(Served):
    """A game: guess a number below 10. ``fault`` is what goes wrong; ``room`` is how many sessions there may be."""

    def __init__(self, fault="", room=4, schema=SCHEMA):
        self.fault, self.has_capacity, self.schema = fault, room, schema
        self.open = self.most = self.sessions = 0
        self.resets = []

    def routes(self):
        return [web.get("/schema", self._schema), web.get("/ws", self._play)]

    async def _schema(self, request):
        return web.json_response({"action": self.schema, "observation": {}})

    async def _play(self, request):
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if self.open >= self.has_capacity:
            await socket.send_json({"type": "error", "data": {"message": "full", "code": "CAPACITY_REACHED"}})
            await socket.close()
            return socket
        self.open += 1
        self.sessions += 1
        self.most = max(self.most, self.open)
        try:
            await self._session(socket)
        finally:
            self.open -= 1
        return socket

    async def _session(self, socket):
        number = 0
        async for message in socket:
            if message.type is not WSMsgType.TEXT:
                break
            told = json.loads(message.data)
            if told["type"] == "close":
                break
            if told["type"] == "state":
                await socket.send_json({"type": "state", "data": {}})
            elif told["type"] == "reset":
                self.resets.append(told["data"])
                number = random.Random(told["data"]["seed"]).randrange(10)
                await socket.send_json(
                    {"type": "observation", "data": {"observation": {"hint": "0-9?"}, "reward": None, "done": False}}
                )
            elif self.fault == "dies":
                await socket.close()
            elif self.fault == "silent":
                await asyncio.sleep(30)
            elif self.fault == "garbage":
                await socket.send_str("[1, 2]")
            elif self.fault == "breaks":
                await socket.send_json({"type": "error", "data": {"message": "the game broke", "code": "EXECUTION_ERROR"}})
            elif not isinstance(told["data"].get("number"), int):
                errors = [{"loc": ["number"], "msg": "Input should be a valid integer"}]
                await socket.send_json(
                    {"type": "error", "data": {"message": "x", "code": "VALIDATION_ERROR", "errors": errors}}
                )
            else:
                said = told["data"]["number"]
                seen = {"hint": "right" if said == number else "higher" if said < number else "lower"}
                data = {"observation": seen, "reward": float(said == number), "done": said == number}
                await socket.send_json({"type": "observation", "data": data})
