"""Losses of single calls: an installed algorithm's, an object's, a function's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from rlhf_host import Batch, LossTerm, Needs, Outputs, RoleNeed, UserError, hookimpl
from rlhf_host.installed import find
from rlhf_host.internals import Loaded, PluginManager, PluginSpec, describe, has_hooks
from rlhf_host.settings import merge_needs

Loss = str | Mapping[str, Any] | Callable[..., Any] | object
"""An algorithm's name, a mapping of ``name`` and its options, an object with ``compute_loss``, or a function ``(outputs, batch)``
that returns a ``LossTerm``, a list of them, or a tensor ``[B, T]`` that is a loss of each token in the loss mask."""


OF_A_RUN = {
    *("run_started", "run_finished", "auxiliary_rows", "step_finished", "step_metrics", "adjust", "saved_config", "state_dict")
}
"""Hooks that are called, and states that are saved, of the session's own plugins alone."""


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


@dataclass(slots=True)
class Losses:
    """The plugins of losses of single calls. A named one is made once, so it is the same in every call."""

    roles: Mapping[str, bool]
    """The session's roles; true: it is trained."""
    _named: dict[str, PluginManager] = field(default_factory=dict)

    @contextmanager
    def plugins(self, loss: Loss) -> Iterator[PluginManager]:
        """Yields the manager of one loss. Raises ``UserError`` for one that needs what a call does not have."""
        spec = spec_of(loss)
        if spec.given is not None:  # it is there already, and is the caller's
            with closing(self._checked(spec)) as manager:
                yield manager
            return
        key = f"{spec.name} {json.dumps(spec.options, sort_keys=True, default=repr)}"
        if key not in self._named:
            self._named[key] = self._checked(spec)
        yield self._named[key]

    def close(self) -> None:
        for manager in self._named.values():
            manager.close()
        self._named.clear()

    def _checked(self, spec: PluginSpec) -> PluginManager:
        manager = PluginManager.from_specs([spec])
        (key,) = manager.by_key
        if hooks := OF_A_RUN.intersection(manager.hooks(key)):
            missing = f"{spec.name} has {min(hooks)}, which is called of the session's own plugins alone"
            raise UserError(f"{missing}: start the session with it as algo, and give no loss")
        for need in merge_needs(manager).roles:
            if self.roles.get(need.name) != need.trainable:
                trains = " to train" if need.trainable else ""
                raise UserError(f"the loss needs the role {need.name}{trains}: start the session with algo, which loads it")
        return manager
