"""A model that answers without a run: behind the policy server, in a terminal, or as a reward server."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhf_host.command import rlhf
from rlhf_host.config.schema import RunConfig
from rlhf_host.errors import UserError
from rlhf_host.models.loading import load_tokenizer
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.records.episodes import Episode, Message, Task
from rlhf_host.records.messages import Reply
from rlhf_host.records.needs import Needs, RoleNeed
from rlhf_host.rollouts.policy import EpisodePolicy
from rlhf_host.serving.app import PolicyServer
from rlhf_host.serving.rewards import RewardServer
from rlhf_host.training.assemble import episodes_of
from rlhf_host.training.events import EventLoop
from rlhf_host.training.export import head_of
from rlhf_host.training.run import using_roles


def serve(
    config: RunConfig, *, host: str, port: int, model: str, key: str | None, ready: Callable[[PolicyServer], Any]
) -> None:
    """Serve the actor until interrupted.

    Args:
        model: its name for clients.
        key: the API key; ``None``: a new one.
        ready: told of the server when it answers.

    Raises:
        UserError: where no server can be started.
        KeyboardInterrupt: when asked to stop.
    """
    with _policies(config) as (events, policy):
        server = events.run(PolicyServer.start(host, port, model=model, shared=policy))
        if key is not None:
            server.api_key = key
        ready(server)
        _until_interrupted(events, server)


def serve_reward(
    config: RunConfig, *, host: str, port: int, model: str, key: str | None, ready: Callable[[RewardServer], Any]
) -> None:
    """Serve the actor, a model with a scalar head, as a reward model until interrupted.

    Args:
        model: its name for clients.
        key: what clients must have as API key; ``None``: they need none.
        ready: told of the server when it answers.

    Raises:
        UserError: where no server can be started, or the model has no scalar head.
        KeyboardInterrupt: when asked to stop.
    """
    needs = Needs(data="preference", roles=(RoleNeed("actor", head="scalar", source=None),))  # no engine
    tokenizer = load_tokenizer(config.roles["actor"])
    with using_roles(config, PluginManager([]), tokenizer, needs) as (started, events, _):
        server = RewardServer(started.handles["actor"], model, key, config.rollout.max_tokens)
        events.run(server.start(host, port))
        ready(server)
        _until_interrupted(events, server)


def _until_interrupted(events: EventLoop, server: PolicyServer | RewardServer) -> None:
    try:
        events.run(asyncio.Event().wait())
    finally:
        events.run(server.close(), interruptible=False)


def talk(config: RunConfig, turns: Callable[[Callable[[list[Message]], Awaitable[Reply]]], Coroutine[Any, Any, None]]) -> None:
    """Run ``turns`` with a function that answers a conversation. Raises ``KeyboardInterrupt`` when asked to stop."""
    with _policies(config) as (events, policy):
        events.run(turns(policy().chat))


@contextmanager
def _policies(config: RunConfig) -> Iterator[tuple[EventLoop, Callable[[], EpisodePolicy]]]:
    """An event loop, and what makes policies of the actor for it. Raises ``UserError`` for a model that writes no text."""
    model = config.roles["actor"].model
    if model and head_of(Path(model).expanduser()) == "scalar":
        raise UserError(f"{model} has a scalar head and writes no text: {rlhf('serve-reward', model)}")
    tokenizer = load_tokenizer(config.roles["actor"])
    manager, numbers = PluginManager([]), itertools.count()
    with using_roles(config, manager, tokenizer, Needs(roles=(RoleNeed("actor", source=None),))) as (started, events, _):
        episodes = episodes_of(config, manager, started, config.data, config.rollout)

        def policy() -> EpisodePolicy:
            number = next(numbers)
            return episodes.policy(Episode(f"served-{number}", "served", Task(""), number, config.seed, split="eval"))

        yield events, policy
