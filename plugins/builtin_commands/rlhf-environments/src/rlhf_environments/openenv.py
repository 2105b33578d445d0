"""An environment as a server of OpenEnv: a WebSocket for each episode, tools as those of MCP.

``reset`` takes ``task`` (an index), ``seed`` and ``sample``; ``step`` an answer: ``message``, and ``tool_calls`` and ``truncated``
if there are any. An observation has what is new as ``text``, the whole conversation as ``messages``, and ``tools``. The reward
comes with the end of an episode; what fails is an error, never a reward.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rlhf_server import ApiError, Route

from rlhf_environments.playing import Environment, Play, Result
from rlhf_environments.policy import Answer, Question
from rlhf_environments.serving import BODY_BYTES, Invalid, Server, answer_of, failure, of_this_machine, text_of, turn_told

if TYPE_CHECKING:
    from aiohttp import web

RESET = ("seed", "episode_id", "task", "sample")
CODES = {"invalid": "VALIDATION_ERROR", "full": "CAPACITY_REACHED", "failed": "EXECUTION_ERROR"}

_TEXT, _LIST = {"type": "string"}, {"type": "array", "items": {"type": "object"}}
SCHEMA = {
    "action": {
        "title": "Answer",
        "type": "object",
        "properties": {"message": _TEXT, "tool_calls": _LIST, "truncated": {"type": "boolean"}, "reasoning": _TEXT},
        "required": ["message"],
    },
    "observation": {
        "title": "Turn",
        "type": "object",
        "properties": {"text": _TEXT, "messages": _LIST, "new": _LIST, "tools": _LIST},
    },
    "state": {
        "title": "State",
        "type": "object",
        "properties": {"episode_id": _TEXT, "step_count": {"type": "integer"}},
    },
}


class _Session:
    """One client: an episode at a time."""

    def __init__(self, environment: Environment):
        self.environment = environment
        self.play: Play | None = None
        self.turn: Question | Result | None = None
        self.episode_id, self.steps = "", 0

    async def ask(self, kind: Any, data: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Returns the kind and the data of an answer."""
        if kind == "reset":
            return "observation", await self._reset(data)
        if kind == "step":
            return "observation", await self._step(data)
        if kind == "state":
            return "state", {"episode_id": self.episode_id or None, "step_count": self.steps}
        if kind == "mcp":
            return "mcp", await self._mcp(data)
        raise Invalid(f"{kind!r}: one of reset, step, state, mcp and close")

    async def close(self) -> None:
        if self.play is not None:
            await self.play.close()
            self.play = None

    async def _reset(self, data: Mapping[str, Any]) -> dict[str, Any]:
        if unknown := [name for name in data if name not in RESET]:
            raise Invalid(f"{unknown[0]}: not known; reset takes {', '.join(RESET)}")
        await self.close()
        self.turn, self.steps = None, 0
        self.play, self.turn = await self.environment.start(data.get("task"), data.get("seed"), data.get("sample"))
        self.episode_id = str(data.get("episode_id") or self.play.episode.episode_id)
        return _observation(self.turn)

    async def _step(self, data: Mapping[str, Any]) -> dict[str, Any]:
        kind = data.get("type")
        if kind == "list_tools":
            return {"observation": {"tools": self._tools()}, "reward": None, "done": False}
        if kind == "call_tool":
            name, arguments = data.get("tool_name"), data.get("arguments") or {}
            result, turn = await self._call(name, arguments)
            told = _observation(turn)
            return {**told, "observation": {"tool_name": name, "result": result, "error": None}}
        return _observation(await self._answer(answer_of({name: value for name, value in data.items() if name != "metadata"})))

    async def _answer(self, answer: Answer) -> Question | Result:
        if self.play is None:
            raise Invalid("no episode is open: reset first")
        self.turn = await self.play.answer(answer)
        self.steps += 1
        if isinstance(self.turn, Result):
            play, self.play = self.play, None
            await play.close()
        return self.turn

    def _tools(self) -> list[dict[str, Any]]:
        if not isinstance(self.turn, Question):
            raise Invalid("no episode is open: reset first, then it has its tools")
        functions = [tool.get("function", tool) for tool in self.turn.tools]
        return [
            {
                "name": function["name"],
                "description": function.get("description", ""),
                "input_schema": function.get("parameters") or {"type": "object", "properties": {}},
            }
            for function in functions
        ]

    async def _call(self, name: Any, arguments: Any) -> tuple[str, Question | Result]:
        """Answers with one call of a tool. Returns the result as text, and the turn."""
        names = [tool["name"] for tool in self._tools()]
        if name not in names:
            raise Invalid(f"tool_name: there is no tool {name!r}; there are {', '.join(names) or 'none'}")
        if not isinstance(arguments, Mapping):
            raise Invalid("arguments: an object")
        function = {"name": name, "arguments": dict(arguments)}
        turn = await self._answer(Answer(tool_calls=[{"id": f"call-{self.steps}", "type": "function", "function": function}]))
        if isinstance(turn, Result):
            return "", turn
        return "\n".join(text_of(one.get("content")) for one in turn.new if one["role"] == "tool"), turn

    async def _mcp(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Answers a request of MCP, in JSON-RPC."""
        method, sent = request.get("method"), request.get("params") or {}
        head = {"jsonrpc": "2.0", "id": request.get("id")}
        try:
            if method == "tools/list":
                return {**head, "result": {"tools": [_mcp_form(tool) for tool in self._tools()]}}
            if method == "tools/call":
                result, turn = await self._call(sent.get("name"), sent.get("arguments") or {})
                ended = turn.told if isinstance(turn, Result) else None
                structured = {"done": ended is not None, **({"end": ended} if ended else {})}
                return {**head, "result": {"content": [{"type": "text", "text": result}], "structuredContent": structured}}
        except Exception as error:
            kind, message, _ = failure(error)
            return {**head, "error": {"code": -32602 if kind == "invalid" else -32603, "message": message}}
        return {**head, "error": {"code": -32601, "message": f"{method}: one of tools/list and tools/call"}}


def _mcp_form(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": tool["name"], "description": tool["description"], "inputSchema": tool["input_schema"]}


def _observation(turn: Question | Result) -> dict[str, Any]:
    told = turn_told(turn)
    done = told.pop("done")
    return {"observation": told, "reward": told.pop("reward", None), "done": done}


class OpenEnvServer(Server):
    """An environment behind OpenEnv's WebSocket ``/ws``."""

    def __init__(self, environment: Environment, name: str):
        super().__init__(environment)
        self.name = name
        self._sessions = 0

    def _routes(self) -> Iterator[Route]:
        described = {
            "name": self.name,
            "description": f"{self.name}: {len(self.environment.tasks)} tasks, exported from rlhf-host",
        }
        yield Route("GET", "/ws", self._socket, of_this_machine)
        yield Route("GET", "/health", _says({"status": "healthy"}))
        yield Route("GET", "/metadata", _says(described))
        yield Route("GET", "/schema", _says(SCHEMA))
        for path in ("/reset", "/step", "/mcp"):
            yield Route("POST", path, _no_state, of_this_machine, BODY_BYTES)

    async def _socket(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import WSMsgType, web

        socket = web.WebSocketResponse(max_msg_size=BODY_BYTES, heartbeat=30.0)
        await socket.prepare(request)
        session = _Session(self.environment)
        if self._sessions >= self.environment.most:
            await socket.send_str(_error("full", f"{self._sessions} clients are connected, which is all that may be"))
            await socket.close()
            return socket
        self._sessions += 1
        try:
            async for received in socket:
                if received.type != WSMsgType.TEXT or not await self._reply(socket, session, received.data):
                    break
        finally:
            self._sessions -= 1
            await session.close()
        return socket

    async def _reply(self, socket: web.WebSocketResponse, session: _Session, text: str) -> bool:
        """Answers a message; returns False where the client says goodbye."""
        try:
            sent = json.loads(text)
        except (ValueError, RecursionError) as error:
            await socket.send_str(_error("INVALID_JSON", f"no JSON: {error}"))
            return True
        if not isinstance(sent, dict) or not isinstance(data := sent.get("data") or {}, dict):
            await socket.send_str(_error("invalid", "an object with type and data"))
            return True
        if sent.get("type") == "close":
            return False
        try:
            kind, told = await session.ask(sent.get("type"), data)
            await socket.send_str(json.dumps({"type": kind, "data": told}))
        except ConnectionError:
            return False
        except Exception as error:
            kind, message, _ = failure(error)
            if kind == "failed":
                await session.close()
            with contextlib.suppress(ConnectionError):
                await socket.send_str(_error(kind, message))
        return True


def _error(kind: str, message: str) -> str:
    return json.dumps({"type": "error", "data": {"message": message, "code": CODES.get(kind, kind)}})


def _says(value: Mapping[str, Any]) -> Any:
    async def answer(request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        return web.json_response(value)

    return answer


async def _no_state(request: web.Request) -> web.StreamResponse:
    raise ApiError(404, f"{request.path}: an episode has a state, so it is played over the WebSocket /ws", "not_found")
