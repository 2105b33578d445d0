"""Connections to several servers, each opened when it is first used, and anew after a fault."""

from __future__ import annotations

import asyncio

from rlhf_plugin_mcp.connection import Connection
from rlhf_plugin_mcp.servers import Server


class Pool:
    """The connections of a run, or of an episode."""

    def __init__(self, start_timeout_s: float):
        self.start_timeout_s = start_timeout_s
        self._connections: dict[str, Connection] = {}
        self._turn = asyncio.Lock()

    async def get(self, server: Server) -> Connection:
        """Returns an open connection. Raises ``ServerLost``."""
        async with self._turn:
            connection = self._connections.get(server.name)
            if connection is not None and connection.lost:
                await connection.close()
                connection = None
            if connection is None:
                connection = Connection(server, self.start_timeout_s)
                await connection.open()
                self._connections[server.name] = connection
            return connection

    async def close(self) -> None:
        """Closes all. May be called any number of times."""
        connections, self._connections = list(self._connections.values()), {}
        await asyncio.gather(*(connection.close() for connection in connections))
