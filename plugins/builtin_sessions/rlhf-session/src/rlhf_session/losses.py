"""Losses of single calls: an installed algorithm's, an object's, a function's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rlhf_host import Batch, LossTerm, Needs, Outputs, RoleNeed, UserError, hookimpl
from rlhf_host.installed import find
from rlhf_host.internals import Loaded, PluginSpec, describe, has_hooks

Loss = str | Mapping[str, Any] | Callable[..., Any] | object
"""An algorithm's name, a mapping of ``name`` and its options, an object with ``compute_loss``, or a function ``(outputs, batch)``
that returns a ``LossTerm``, a list of them, or a tensor ``[B, T]`` that is a loss of each token in the loss mask."""


class OnlyActor:
    """The plugin of a session without an algorithm: it trains the actor, and every loss is the caller's."""

    @hookimpl
    def needs(self) -> Needs:
        return Needs(roles=(RoleNeed("actor", trainable=True),), rewards=False)


def only_actor() -> Loaded:
    return Loaded("algo", "only_actor", describe("algo", "only_actor", OnlyActor), OnlyActor())


@dataclass
class FunctionLoss:
    """A function as a plugin with a loss."""

    function: Callable[[Outputs, Batch], Any]

    @hookimpl
    def compute_loss(self, outputs: Outputs, batch: Batch) -> Any:
        loss = self.function(outputs, batch)
        if isinstance(loss, Tensor):
            return [LossTerm(getattr(self.function, "__name__", "loss"), loss)]
        return [loss] if isinstance(loss, LossTerm) else loss


def spec_of(loss: Loss) -> PluginSpec:
    """Returns a loss as a plugin. Raises ``UserError`` for what is none."""
    if isinstance(loss, str):
        return PluginSpec("algo", loss, find("algo", loss))
    if isinstance(loss, Mapping):
        options = dict(loss)
        name = options.pop("name", None)
        if not isinstance(name, str):
            raise UserError("a loss that is a mapping has the name of an algorithm: {'name': 'grpo', 'loss': 'gspo'}")
        return PluginSpec("algo", name, find("algo", name), options)
    if not has_hooks(loss):
        if not callable(loss):
            raise UserError(
                f"a loss is an algorithm's name, a function or an object with compute_loss, not {type(loss).__name__}"
            )
        loss = FunctionLoss(loss)
    name = str(getattr(loss, "__name__", "loss"))
    return PluginSpec("algo", name, describe("algo", name, loss), given=loss)
