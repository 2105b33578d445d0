"""Interface of a server through which the programs of agents ask the policy.

An entry point in the group ``rlhf.servers`` names its class; an installation has at most one. The host makes it as
``Plugin(port=...)`` when the first episode of a run asks for an endpoint (``policy.endpoint()``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from rlhf_host.records.endpoints import Endpoint

if TYPE_CHECKING:
    from rlhf_host.rollouts.policy import EpisodePolicy


class ServerSession(Endpoint, Protocol):
    """An endpoint as the host sees it."""

    ignored: Mapping[str, int]
    """Parameters of requests that had no effect, with how often each was sent."""


class Server(Protocol):
    """Base URLs for the episodes of one run. All calls come from the event loop on which episodes are played."""

    async def open(self, policy: EpisodePolicy) -> ServerSession:
        """Returns a base URL for one attempt at an episode: requests to it call ``policy.answer``. Several may be open at the
        same time. Raises ``UserError`` if no server can be started.
        """

    def close_session(self, session: ServerSession) -> None:
        """Ends a session: cancels requests under way; later ones get an error."""

    async def close(self) -> None:
        """Ends the server."""


class ServerPlugin(Protocol):
    """The class that the entry point names."""

    def __call__(self, *, port: int) -> Server:
        """Returns a server that is not yet started.

        Args:
            port: port on 127.0.0.1; 0: any free one.
        """
