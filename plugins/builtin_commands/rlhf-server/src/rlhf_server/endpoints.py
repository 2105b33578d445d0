"""The policy server of a run: started by the first episode that needs one."""

from __future__ import annotations

import asyncio

from rlhf_host.rollouts import EpisodePolicy
from rlhf_server.app import PolicyServer
from rlhf_server.limits import Limits
from rlhf_server.sessions import Session


class Endpoints:
    """OpenAI's API for the policies of a run's episodes, each at its own base URL; belongs to the run's event loop."""

    def __init__(self, port: int = 0, limits: Limits | None = None):
        self.port, self.limits = port, limits
        self._server: PolicyServer | None = None
        self._starting: asyncio.Lock | None = None

    async def open(self, policy: EpisodePolicy) -> Session:
        """Opens an endpoint. Raises ``UserError`` if no server can be started."""
        if self._starting is None:
            self._starting = asyncio.Lock()
        async with self._starting:
            if self._server is None:
                self._server = await PolicyServer.start(port=self.port, limits=self.limits)
        return self._server.open(policy)

    def close_session(self, session: Session) -> None:
        assert self._server is not None
        self._server.close_session(session)

    async def close(self) -> None:
        if self._server is not None:
            await self._server.close()
            self._server = None
