"""Ports that are agreed on before they are used."""

from __future__ import annotations

import socket


def reserved(address: str) -> socket.socket:
    """Returns a socket that keeps a free port of ``address`` (``getsockname()[1]``), until it is closed, for a server of the
    same port alone: a port that was only looked for may be somebody else's when process 0 listens.
    """
    place = socket.socket()
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one that does not listen leaves the port to one that does
    place.bind((address, 0))
    return place
