"""The plugin under contract, found, loaded and built as a run would; and what a check of it is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeVar, get_args, get_origin

import pluggy

from rlhf_host import Needs, PluginError, Task, hookspecs
from rlhf_host.installed import PluginInfo, build, find, load, load_command
from rlhf_host.internals import Loaded, PluginManager
from rlhf_host.protocols import Writer

T = TypeVar("T")


class Broken(AssertionError):
    """The plugin breaks its contract; the message says how, and what the host expects."""


class Unusable(Exception):
    """The plugin could not be brought to where a check begins: ``stage`` is ``find``, ``load``, ``options``,
    ``hooks``, or ``served``: it takes nothing that the check could show it."""

    def __init__(self, stage: str, message: str):
        super().__init__(message)
        self.stage = stage


@dataclass
class Subject:
    """One plugin, with the options its checks run under.

    Args:
        kind: ``algo``, ``reward``, ``agent``, ``extension``, ``tasks``, ``tracker``, ``weight_sync``, ``command``, or one
            with a protocol.
        name: as ``--algo NAME`` would have it; ``distribution:name`` where two provide it.
        options: as a run would give them.
        tasks: what rewards judge against and agents play.
        texts: what the policy says to them.
        deadline_s: bound on one call of ``score`` and on one episode.
        models: what kernels are tried on, by name, each a function that makes one; default: tiny ones of several families.
        placement: of a runtime that takes one, as ``--placement`` would have it.
    """

    kind: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    tasks: Sequence[Task] = ()
    texts: Sequence[str] = ()
    deadline_s: float = 60.0
    models: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    placement: Sequence[str] = ()

    @cached_property
    def info(self) -> PluginInfo:
        """Raises ``Unusable`` at stage ``find``."""
        with _stage("find"):
            return find(self.kind, self.name)

    @cached_property
    def cls(self) -> type:
        """Raises ``Unusable`` at stage ``load``."""
        info = self.info
        with _stage("load"):
            return load(info)

    @cached_property
    def value(self) -> Any:
        """Returns what the entry point names. Raises ``Unusable`` at stage ``load``."""
        if self.kind != "command":
            return self.cls
        info = self.info
        with _stage("load"):
            return load_command(info)

    @cached_property
    def hooks(self) -> frozenset[str]:
        """Names of the hooks that its class implements; empty when it cannot be loaded."""
        try:
            cls: Any = self.cls
        except Unusable:
            return frozenset()
        pluggies = pluggy.PluginManager(hookspecs.PROJECT)
        marked = {name: pluggies.parse_hookimpl_opts(cls, name) for name in dir(cls)}
        return frozenset((marks.get("specname") or name) for name, marks in marked.items() if marks is not None)

    def build(self, **changes: Any) -> Any:
        """A fresh instance; ``changes`` over the options. Raises ``Unusable`` at stage ``options``."""
        _ = self.cls  # what cannot be loaded fails at that stage
        with _stage("options"):
            return build(self.info, {**self.options, **changes})

    def manager(self, **changes: Any) -> PluginManager:
        """A fresh instance, alone in a manager of its own. Raises ``Unusable`` at stage ``hooks``."""
        plugin = self.build(**changes)
        with _stage("hooks"):
            return PluginManager([Loaded(self.kind, self.info.name, self.info, plugin)])

    def traits(self, expected: type[T]) -> T:
        """Its traits. Raises ``Broken`` where they are no ``expected``, or other ones the second time."""
        first, second = (plugin.traits for plugin in [self.build(), self.build()])
        expect(isinstance(first, expected), f"traits are {type(first).__name__}, not {expected.__name__}")
        expect(first == second, "two instances with the same options have different traits")
        return first

    @property
    def key(self) -> str:
        return f"{self.kind}:{self.info.name}"

    @cached_property
    def needs(self) -> Needs:
        """Returns what the plugin says it needs under these options; nothing where it does not say."""
        needs = self.manager().one("needs")
        return needs if isinstance(needs, Needs) else Needs()

    @cached_property
    def offline(self) -> bool:
        """Returns True if it trains on rows of a data set; False where it cannot be asked, which other checks report."""
        try:
            return not self.needs.samples
        except Exception:
            return False

    @cached_property
    def choices(self) -> list[dict[str, Any]]:
        """The option ``loss`` at each value it can have; no change where there is no such option or it is given."""
        from rlhf_host.installed import options_model  # which loads pydantic

        loss = options_model(self.cls).model_fields.get("loss")
        if "loss" in self.options or loss is None or get_origin(loss.annotation) is not Literal:
            return [{}]
        accepted = []
        for name in get_args(loss.annotation):
            with contextlib.suppress(Unusable):  # not with these options; that some loss works is the first instance's proof
                self.build(loss=name)
                accepted.append({"loss": name})
        return accepted


@contextlib.contextmanager
def _stage(stage: str) -> Iterator[None]:
    try:
        yield
    except PluginError as error:
        raise Unusable(stage, str(error)) from error


def expect(condition: Any, message: str) -> None:
    """Raises ``Broken`` with ``message`` unless ``condition``."""
    if not condition:
        raise Broken(message)


def finish(write: Writer | None) -> None:
    """Let it write what a save has only copied."""
    if write is not None:
        write()


@dataclass(frozen=True, slots=True)
class Check:
    """One rule: ``rule`` in words. ``hooks``: it applies to plugins that implement one of these; ``stage``: the building step
    whose failure it reports."""

    name: str
    rule: str
    function: Callable[[Subject], None]
    hooks: tuple[str, ...] = ()
    stage: str | None = None


CHECKS: list[Check] = []
"""Every check, in the order of definition."""


def check(*hooks: str, stage: str | None = None) -> Callable[[Callable[[Subject], None]], Callable[[Subject], None]]:
    """Mark a function as a check with its name, whose rule is its docstring, of plugins with one of ``hooks`` (none: of all)."""

    def add(function: Callable[[Subject], None]) -> Callable[[Subject], None]:
        CHECKS.append(Check(function.__name__, " ".join((function.__doc__ or "").split()), function, hooks, stage))
        return function

    return add
