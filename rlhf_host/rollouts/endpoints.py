"""Base URLs for the episodes of a run, from the installed server, which is imported when the first episode asks for one."""

from __future__ import annotations

from typing import cast

from rlhf_host.errors import blaming
from rlhf_host.plugins.selection import load
from rlhf_host.plugins.servers import find_server
from rlhf_host.protocols import Server, ServerPlugin, ServerSession
from rlhf_host.rollouts.policy import EpisodePolicy


class Endpoints:
    """Endpoints of a run; used on its event loop.

    Args:
        port: port on 127.0.0.1; 0: any free one.
    """

    def __init__(self, port: int = 0):
        self.port = port
        self._server: Server | None = None
        self._name = ""

    async def open(self, policy: EpisodePolicy) -> ServerSession:
        """Opens an endpoint. Raises ``PluginError`` if no server is installed, ``UserError`` if it cannot be started,
        ``RunError`` for a defect of it.
        """
        if self._server is None:
            info = find_server()
            self._name, plugin = str(info), cast(ServerPlugin, load(info))
            with blaming(self._name, "__init__"):
                self._server = plugin(port=self.port)
        with blaming(self._name, "open"):
            return await self._server.open(policy)

    def close_session(self, session: ServerSession) -> None:
        assert self._server is not None
        self._server.close_session(session)

    async def close(self) -> None:
        if self._server is not None:
            await self._server.close()
            self._server = None
