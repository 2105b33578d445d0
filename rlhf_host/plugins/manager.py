"""The plugin manager of one run: its selected plugins, each called on its own and named in what goes wrong.

pluggy's broadcast drops ``None``, loses names and stops at the first failure, so every call here reaches one plugin's
implementation (``subset_hook_caller``), wrapped by all the selected plugins' wrappers of that hook. A wrapper's ``yield``
gives a list with that one result (empty for ``None``), and the wrapper returns such a list; an awaitable is awaited later.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, NoReturn

import pluggy
from pluggy import HookimplOpts

from rlhf_host import hookspecs
from rlhf_host.errors import PluginError, RunError, UserError, asks_to_stop, blaming, near_matches
from rlhf_host.hookspecs import RULES
from rlhf_host.plugins.answers import changed, other_answer, versions
from rlhf_host.plugins.discovery import PluginInfo, discover
from rlhf_host.plugins.specs import PluginSpec
from rlhf_host.plugins.threads import Threads
from rlhf_host.plugins.unasked import unasked
from rlhf_host.records.episodes import EpisodeFailed
from rlhf_host.records.needs import Needs

log = logging.getLogger(__name__)

_THREADS = 64  # these hooks mostly wait: for environments, judges, sandboxes


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """One plugin that is made, from a ``PluginSpec``."""

    kind: str
    alias: str
    info: PluginInfo
    plugin: object
    weight: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options that it was built from."""

    @property
    def key(self) -> str:
        return f"{self.kind}:{self.alias}"

    def __str__(self) -> str:
        return f"{self.key} ({self.info.source})"


class HookFailed(RunError):
    """A plugin's hook raised; the original is ``__cause__``."""

    def __init__(self, message: str, key: str = "", distribution: str = "", hook: str = ""):
        super().__init__(message)
        self.key = key
        self.distribution = distribution
        self.hook = hook


class PluginManager:
    """Calls hooks of the plugins of one run. Usable from any thread; ``acall`` belongs on the run's event loop.

    Raises ``PluginError`` at once when a plugin implements a hook that does not exist, names arguments a hook does not have, or
    when two plugins implement a hook that has one implementation. Without ``threads`` every hook runs on its caller's thread.
    """

    def __init__(self, loaded: Sequence[Loaded], *, threads: bool = True):
        self.loaded: tuple[Loaded, ...] = ()
        self.by_key: dict[str, Loaded] = {}
        self._pluggy = _Hooks(hookspecs.PROJECT)
        self._pluggy.add_hookspecs(hookspecs)
        self._parts: dict[str, dict[str, _Part]] = {hook: {} for hook in RULES}
        self._callers: dict[tuple[str, str], pluggy.HookCaller] = {}
        self._needs: dict[str, Needs | None] = {}
        self.awaited = Counter[tuple[str, str]]()
        """Plugin and hook → calls of ``acall`` that have no answer yet."""
        self.silenced: set[str] = set()
        """Keys of plugins that failed in a ``report``."""
        self._threads = Threads(_THREADS)
        self._threaded = [hook for hook, rule in RULES.items() if rule.threaded and threads]
        self._blocking: set[tuple[str, str]] = set()
        self.add(*loaded)

    def add(self, *loaded: Loaded) -> None:
        """Let more plugins take part, after the others."""
        for item in loaded:
            key = item.key
            if key in self.by_key:
                raise PluginError(f"two plugins are called {key}; give one an alias: ALIAS={item.info.name}")
            self.by_key[key] = item
            part = self._register(item)
            threaded = (hook for hook in self._threaded if hook in part.functions)
            self._blocking |= {(key, hook) for hook in threaded if not inspect.iscoroutinefunction(part.functions[hook])}
        self.loaded += loaded
        self._callers.clear()  # they leave out by name those that they knew
        self._refuse_rivals()

    @classmethod
    def from_specs(cls, specs: Sequence[PluginSpec], *, threads: bool = True) -> PluginManager:
        """Makes the plugins. Raises ``PluginError`` for one that cannot be made, or is not the controller's."""
        known = discover()
        loaded = [Loaded(s.kind, s.alias, s.locate(known), s.build(known), s.weight, s.options) for s in specs]
        return cls(loaded, threads=threads)

    def names(self, hook: str, kind: str | None = None) -> list[str]:
        """Keys of the plugins that implement ``hook``, in selection order; those that only wrap it are not among them."""
        return [key for key in self._parts[hook] if kind is None or self.by_key[key].kind == kind]

    def names_for(self, hook: str, role: str) -> list[str]:
        """Returns keys of the plugins that implement ``hook`` and train the role: those whose ``needs`` have it as trainable, and
        for the actor also those that train no role of their own."""
        trained = {key: {need.name for need in own.roles if need.trainable} for key, own in self.needs().items()}
        return [key for key in self._parts[hook] if role in (trained.get(key) or {"actor"})]

    def needs(self) -> dict[str, Needs]:
        """Key → the plugin's ``needs``. Each is asked once, because they do not change."""
        for key in self._parts["needs"]:
            if key not in self._needs:
                self._needs[key] = self.call(key, "needs")
        return {key: needs for key in self._parts["needs"] if (needs := self._needs[key]) is not None}

    def hooks(self, key: str) -> list[str]:
        """Returns the hooks that the plugin implements or wraps, in the order of the contract."""
        return [hook for hook in RULES if any(each.plugin.key == key for each in self._implementations(hook))]

    def has(self, hook: str) -> bool:
        return bool(self._parts[hook])

    def call(self, key: str, hook: str, **kwargs: Any) -> Any:
        """One plugin's result; ``None`` also when it does not implement ``hook``.

        Raises ``HookFailed`` for whatever the hook raised, for an answer that its rule does not have, and for a change of what
        other plugins see too; but ``EpisodeFailed`` passes, and a ``UserError`` becomes a ``PluginError`` that names the plugin.
        """
        if key not in self._parts[hook]:
            return None
        rule = RULES[hook]
        # Lists and dicts are each plugin's own; of tensors a copy would cost too much, but for the rewards that are passed on.
        own = {name: value.copy() if type(value) in (list, dict) else value for name, value in kwargs.items()}
        before = versions(own)
        try:
            results = (self._callers.get((key, hook)) or self._caller(key, hook))(**own)
            if not isinstance(results, list):
                raise TypeError(f"a wrapper of {hook} returned {type(results).__name__} instead of the list its yield gave")
            answer = results[0] if results else None
            if rule.reads and isinstance(answer, Iterator):
                answer = list(answer)
        except BaseException as error:
            self._raise_named(error, key, hook)
        if (name := changed(before, versions(own))) is not None:
            self.refuse_answer(key, hook, f"changed {name} in {hook}, which the other plugins and the host use: work on a copy")
        if inspect.iscoroutine(answer) and not (rule.awaited or rule.threaded):
            answer.close()
            self.refuse_answer(key, hook, f"gave a coroutine from {hook}, which is not awaited: write def, not async def")
        if not inspect.isawaitable(answer) and (odd := other_answer(rule, answer, kwargs)) is not None:
            self.refuse_answer(key, hook, f"gave {odd[0]} from {hook}, expected {odd[1]}")
        return answer

    def each(self, hook: str, kind: str | None = None, **kwargs: Any) -> list[tuple[str, Any]]:
        """``(key, result)`` of every implementation in selection order, ``None`` left out."""
        results = ((key, self.call(key, hook, **kwargs)) for key in self.names(hook, kind))
        return [(key, result) for key, result in results if result is not None]

    @contextmanager
    def around(self, hook: str, **kwargs: Any) -> Iterator[None]:
        """Surrounds the block with what every implementation returns."""
        with ExitStack() as stack:
            for key, own in self.each(hook, **kwargs):
                with blaming(key, hook):
                    stack.enter_context(own)
            yield

    def report(self, hook: str, **kwargs: Any) -> None:
        """Calls every implementation of a hook that only looks on. Logs the first failure of a plugin, then skips that plugin."""
        for key in self.names(hook):
            if key not in self.silenced:
                try:
                    self.call(key, hook, **kwargs)
                except (HookFailed, PluginError) as error:
                    self.silenced.add(key)
                    log.warning("%s; the run goes on, and it hears no more of it", error)

    def one(self, hook: str, kind: str | None = None, **kwargs: Any) -> Any:
        """The result of the only implementation, or ``None`` without one."""
        keys = self.names(hook, kind)
        if len(keys) > 1:
            raise PluginError(f"{' and '.join(keys)} implement {hook}; this call is for one")
        return self.call(keys[0], hook, **kwargs) if keys else None

    async def acall(self, key: str, hook: str, *, within_s: float | None = None, **kwargs: Any) -> Any:
        """As ``call``, awaiting an awaitable result; synchronous ``score`` and agent hooks run in the thread pool. Raises
        ``TimeoutError`` when there is no answer after ``within_s``."""
        self.awaited[key, hook] += 1
        try:
            async with asyncio.timeout(within_s):
                if (key, hook) in self._blocking:
                    job = self._threads.submit(lambda: self.call(key, hook, **kwargs))
                    try:
                        result = await asyncio.wrap_future(job)
                    except asyncio.CancelledError:
                        self._threads.abandon(job)
                        raise
                else:
                    result = self.call(key, hook, **kwargs)
                if not inspect.isawaitable(result):
                    return result
                try:
                    result = await result
                except BaseException as error:
                    self._raise_named(error, key, hook, awaited=True)
        except TimeoutError as error:  # the hook's own has the plugin's name by now
            raise TimeoutError(f"{key}: no answer of {hook} in {within_s:g} s") from error
        finally:
            self.awaited[key, hook] -= 1
        if (odd := other_answer(RULES[hook], result, kwargs)) is not None:
            self.refuse_answer(key, hook, f"gave {odd[0]} from {hook}, expected {odd[1]}")
        return result

    def close(self) -> None:
        """Let the thread pool end."""
        self._threads.close()

    def refuse_answer(self, key: str, hook: str, message: str) -> NoReturn:
        """Raises ``HookFailed`` for an answer that no one can use: ``key`` and the message."""
        raise HookFailed(f"{key} {message}", key, self.by_key[key].info.distribution, hook)

    def _register(self, loaded: Loaded) -> _Part:
        """Its own implementations, without wrappers."""
        own, wrappers = _Part(loaded.key), _Part(loaded.key)
        for attribute in dir(loaded.plugin):
            marks = self._pluggy.parse_hookimpl_opts(loaded.plugin, attribute)
            if marks is None:
                continue
            hook = marks.get("specname") or attribute
            if hook not in RULES:
                if marks.get("optionalhook"):
                    continue
                raise PluginError(f"{loaded} implements {hook!r}, which is not a hook{near_matches(hook, RULES)}")
            part = wrappers if marks.get("wrapper") or marks.get("hookwrapper") else own
            if part is own and hook in own.functions:
                raise PluginError(f"{loaded} implements {hook} twice, as {own.functions[hook].__name__} and as {attribute}")
            part.add(hook, getattr(loaded.plugin, attribute), marks)
        for part, name in ((own, loaded.key), (wrappers, f"{loaded.key} (wrappers)")):
            try:
                self._pluggy.register(part, name)
            except pluggy.PluginValidationError as error:
                raise PluginError(f"{loaded}: {_foreign_argument(part) or ' '.join(str(error).split())}") from error
        for hook in own.functions:
            self._parts[hook][loaded.key] = own
        return own

    def _refuse_rivals(self) -> None:
        for hook in (hook for hook, rule in RULES.items() if rule.calls == "one" and rule.per == "run"):
            if len(keys := self.names(hook)) > 1:
                first, second = (self.by_key[key] for key in keys[:2])
                raise PluginError(f"{first} and {second} both implement {hook}, and a run has one; leave one out")
        # Agents are called by name, so several may be selected; a plugin of another kind would answer for all of them.
        playing = {key: hook for hook, rule in RULES.items() if rule.per == "agent" for key in self.names(hook)}
        for key, hook in playing.items():
            if self.by_key[key].kind != "agent" and len(playing) > 1:
                other = next(self.by_key[other] for other in playing if other != key)
                raise PluginError(
                    f"{self.by_key[key]} and {other} both play episodes ({hook}), and a run has one agent; leave one out"
                )

    def _implementations(self, hook: str) -> list[Any]:
        """Wrappers too."""
        return getattr(self._pluggy.hook, hook).get_hookimpls()

    def _caller(self, key: str, hook: str) -> pluggy.HookCaller:
        others = [part for other, part in self._parts[hook].items() if other != key]
        caller = self._callers[key, hook] = self._pluggy.subset_hook_caller(hook, others)
        return caller

    def _raise_named(self, error: BaseException, key: str, hook: str, *, awaited: bool = False) -> NoReturn:
        closed = awaited and isinstance(error, GeneratorExit)
        if closed or isinstance(error, EpisodeFailed | HookFailed) or asks_to_stop(error):
            raise error
        if type(error).__name__ == "BdbQuit":  # who leaves the debugger means the run, not this one call
            raise KeyboardInterrupt from error
        culprit = self.by_key[self._culprit(error, key, hook)]
        cause = " ".join(str(error).split())
        if isinstance(error, UserError):
            raise PluginError(f"{culprit}: {cause}") from error
        message = f"{culprit} failed in {hook}: {type(error).__name__}{': ' if cause else ''}{cause}{unasked(error)}"
        raise HookFailed(message, culprit.key, culprit.info.distribution, hook) from error

    def _culprit(self, error: BaseException, key: str, hook: str) -> str:
        """The plugin whose code raised: ``key``, or another that wraps the hook; the deepest frame of theirs decides."""
        owners: dict[CodeType | None, str] = {}
        for implementation in self._implementations(hook):
            if implementation.wrapper or implementation.hookwrapper:
                owners[getattr(implementation.function, "__code__", None)] = implementation.plugin.key
        owners[getattr(self._parts[hook][key].functions[hook], "__code__", None)] = key
        trace, owner = error.__traceback__, key
        while trace is not None:
            owner = owners.get(trace.tb_frame.f_code, owner)
            trace = trace.tb_next
        return owner


def _foreign_argument(part: _Part) -> str:
    """Returns what is wrong with an implementation that names arguments which its hook does not have."""
    for hook, function in part.functions.items():
        spec = list(inspect.signature(getattr(hookspecs, hook)).parameters)
        for name, parameter in inspect.signature(function).parameters.items():
            if name not in {*spec, "self"} and parameter.kind is not inspect.Parameter.VAR_KEYWORD:
                near = f"{near_matches(name, spec)} (it has {', '.join(spec) or 'none'})"
                return f"{function.__name__}() takes {name!r}, which is no argument of {hook}{near}"
    return ""


class _Part:
    """Object that pluggy registers: a plugin's own implementations, or its wrappers.

    Apart, because ``subset_hook_caller`` leaves out whole plugins and wrappers must stay; and compared by identity,
    because pluggy keeps plugins in sets, and two equal dataclasses are two plugins.
    """

    def __init__(self, key: str):
        self.key = key
        self.functions: dict[str, Callable[..., Any]] = {}
        self.marks: dict[str, HookimplOpts] = {}

    def add(self, hook: str, function: Callable[..., Any], marks: HookimplOpts) -> None:
        name = f"hook_{len(self.marks)}"
        setattr(self, name, function)
        self.functions[hook] = function
        self.marks[name] = {**marks, "specname": hook}


class _Hooks(pluggy.PluginManager):
    def parse_hookimpl_opts(self, plugin: object, name: str) -> HookimplOpts | None:
        return plugin.marks.get(name) if isinstance(plugin, _Part) else super().parse_hookimpl_opts(plugin, name)
