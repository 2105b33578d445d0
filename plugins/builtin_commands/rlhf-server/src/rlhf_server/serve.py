"""A model that answers without a run: behind the policy server, in a terminal, or as a reward server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhf_host import Message, Needs, Reply, RoleNeed, Session, UserError, session
from rlhf_host.commands import rlhf
from rlhf_host.models import head_of
from rlhf_host.settings import RunConfig
from rlhf_server.app import PolicyServer
from rlhf_server.rewards import RewardServer


def serve(
    config: RunConfig, *, host: str, port: int, model: str, key: str | None, ready: Callable[[PolicyServer], Any]
) -> None:
    """Serves the actor until interrupted.

    Args:
        model: its name for clients.
        key: the API key; ``None``: a new one.
        ready: called with the server when it answers.

    Raises:
        UserError: no server can be started.
        KeyboardInterrupt: the server was asked to stop.
    """
    with _talking(config) as running:
        server = running.run(PolicyServer.start(host, port, model=model, shared=running.policy, role=running.roles["actor"]))
        if key is not None:
            server.api_key = key
        ready(server)
        _until_interrupted(running, server)


def serve_reward(
    config: RunConfig, *, host: str, port: int, model: str, key: str | None, ready: Callable[[RewardServer], Any]
) -> None:
    """Serves the actor, a model with a scalar head, as a reward model until interrupted.

    Args:
        model: its name for clients.
        key: API key of clients; None: they need none.
        ready: called with the server when it answers.

    Raises:
        UserError: no server can be started, or the model has no scalar head.
        KeyboardInterrupt: the server was asked to stop.
    """
    needs = Needs(data="preference", roles=(RoleNeed("actor", head="scalar", source=None),))  # no engine
    with session(config, needs=needs) as running:
        server = RewardServer(running.roles["actor"], model, key, config.rollout.max_tokens)
        running.run(server.start(host, port))
        ready(server)
        _until_interrupted(running, server)


def _until_interrupted(running: Session, server: PolicyServer | RewardServer) -> None:
    try:
        running.run(asyncio.Event().wait())
    finally:
        running.run(server.close(), interruptible=False)


def talk(config: RunConfig, turns: Callable[[Callable[[list[Message]], Awaitable[Reply]]], Coroutine[Any, Any, None]]) -> None:
    """Runs ``turns`` with a function that answers a conversation. Raises ``KeyboardInterrupt`` if asked to stop."""
    with _talking(config) as running:
        running.run(turns(running.policy().chat))


@contextmanager
def _talking(config: RunConfig) -> Iterator[Session]:
    """Starts a session with the actor. Raises ``UserError`` for a model that writes no text."""
    model = config.roles["actor"].model
    if model and head_of(Path(model).expanduser()) == "scalar":
        raise UserError(f"{model} has a scalar head and writes no text: {rlhf('serve-reward', model)}")
    kernels = logging.getLogger("rlhf_host.kernels")
    level = kernels.level
    try:
        if config.kernels.name == "auto":
            kernels.setLevel(logging.ERROR)  # nobody chose any, and nothing trains
        with session(config) as running:
            yield running
    finally:
        kernels.setLevel(level)
