"""A training server that works until it is interrupted."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from rlhf_host import Scratch, UserError
from rlhf_host.internals import locked
from rlhf_host.settings import RunConfig
from rlhf_tinker.app import TrainingServer
from rlhf_tinker.models import Base, limits
from rlhf_tinker.states import States

PREFIX = "tml-"
"""Beginning of every key: Tinker's client takes no others."""


def key_of(given: str | None) -> tuple[str, bool]:
    """Returns the API key, and True if it is a new one: the one that is given, that of ``TINKER_API_KEY``, or a new one. Raises
    ``UserError`` for one that the client does not take.
    """
    key = given or os.environ.get("TINKER_API_KEY")
    if key is None:
        return PREFIX + secrets.token_urlsafe(24), True
    if not key.startswith(PREFIX):
        raise UserError(f"the API key (--key-file, or TINKER_API_KEY) begins with {PREFIX}: Tinker's client takes no others")
    if len(key) < 16:
        raise UserError(f"the API key (--key-file, or TINKER_API_KEY) has at least 16 characters; this one has {len(key)}")
    return key, False


def serve(
    config: RunConfig,
    *,
    host: str,
    port: int,
    name: str,
    key: str,
    states: Path,
    most: int,
    ready: Callable[[TrainingServer], Any],
) -> None:
    """Serves until interrupted.

    Args:
        config: with the base model as the actor.
        name: the base's name for clients.
        states: folder of saved weights.
        most: number of models that are loaded at a time.
        ready: called with the server when it answers.

    Raises:
        UserError: no server can be started.
        KeyboardInterrupt: the server was asked to stop.
    """
    vocabulary, room = limits(config)
    try:
        states.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--states {states}: {error.strerror}") from error
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(states))
        except UserError as error:
            raise UserError(f"{states} is the folder of a server that is at work: end it, or give another --states") from error
        aside = stack.enter_context(Scratch("rlhf-tinker-", gettempdir()))
        kept = States(states)
        kept.clean()
        server = TrainingServer(Base(name, config), kept, key, aside, most=most, vocabulary=vocabulary, room=room)
        asyncio.run(_until_interrupted(server, host, port, ready))
    raise KeyboardInterrupt


async def _until_interrupted(server: TrainingServer, host: str, port: int, ready: Callable[[TrainingServer], Any]) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, stop.set)
    await server.start(host, port)
    try:
        ready(server)
        await stop.wait()
        for number in (signal.SIGINT, signal.SIGTERM):  # a second one ends it at once
            loop.remove_signal_handler(number)
    finally:
        await server.close()
