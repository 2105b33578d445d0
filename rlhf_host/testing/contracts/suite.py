"""The suites: which checks a plugin gets, running them, and the pytest class made of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_host.errors import UserError
from rlhf_host.testing.contracts.subject import Broken, Subject, Unusable


@dataclass(frozen=True, slots=True)
class Check:
    """One rule. ``hooks``: it applies to plugins that implement one of these; ``kinds``: to these alone; ``stage``: the building
    step whose failure it reports."""

    name: str
    function: Callable[[Subject], None]
    hooks: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    stage: str | None = None

    @property
    def rule(self) -> str:
        """The rule in words, from the function's docstring."""
        return " ".join((self.function.__doc__ or "").split())


@dataclass(frozen=True, slots=True)
class CheckResult:
    """``passed`` is ``None`` where the check could not run because a more basic one failed; ``message`` says why."""

    name: str
    passed: bool | None
    message: str = ""


CHECKS: list[Check] = []
"""Every check, in the order of definition."""

_MODULES = ("common", "algorithm", "loss", "reward", "agent", "extension", "tasks", "tracker", "sync", "kernels")


def check(
    *hooks: str, kinds: tuple[str, ...] = (), stage: str | None = None
) -> Callable[[Callable[[Subject], None]], Callable[[Subject], None]]:
    """Mark a function as a check named after it, of plugins that implement one of ``hooks`` (none: of all) or are of ``kinds``."""

    def add(function: Callable[[Subject], None]) -> Callable[[Subject], None]:
        CHECKS.append(Check(function.__name__, function, hooks, kinds, stage))
        return function

    return add


def all_checks() -> list[Check]:
    """Every check there is: of all plugins first, then by hook."""
    for name in _MODULES:
        importlib.import_module(f"rlhf_host.testing.contracts.{name}")
    return list(CHECKS)


def checks_of(subject: Subject) -> list[Check]:
    """The checks that apply: those of all plugins, those of its kind, and those of the hooks it implements."""

    def applies(check: Check) -> bool:
        of_kind = not check.kinds or subject.kind in check.kinds
        return of_kind and (not check.hooks or bool(subject.hooks.intersection(check.hooks)))

    return [check for check in all_checks() if applies(check)]


def run_contract(kind: str, name: str, options: Mapping[str, Any] | None = None, **settings: Any) -> list[CheckResult]:
    """Every check that applies to the installed plugin, none stopping the others. Needs no pytest.

    Args:
        kind: ``algo``, ``reward``, ``agent``, ``extension``, ``tasks``, ``tracker``, ``weight_sync`` or ``kernels``.
        name: the plugin's name.
        options: its options.
        settings: fields of ``Subject``, such as ``tasks`` and ``texts``.
    """
    subject = Subject(kind, name, dict(options or {}), **settings)
    return [run_check(check, subject) for check in checks_of(subject)]


def run_check(check: Check, subject: Subject) -> CheckResult:
    """One check's result; whatever the plugin raises is a failure with its name."""
    try:
        check.function(subject)
    except Unusable as unusable:
        return CheckResult(check.name, False if unusable.stage == check.stage else None, str(unusable))
    except Broken as broken:
        return CheckResult(check.name, False, str(broken))
    except ModuleNotFoundError as error:
        if error.name in ("hypothesis", "peft", "pytest"):
            return CheckResult(check.name, None, str(_missing(error)))
        return CheckResult(check.name, False, f"{type(error).__name__}: {error}")
    except (Exception, SystemExit) as error:
        return CheckResult(check.name, False, f"{type(error).__name__}: {error}")
    return CheckResult(check.name, True)


def algorithm_contract(
    name: str, options: Mapping[str, Any] | None = None, *, group_relative: bool | None = None, **settings: Any
) -> type:
    """A class of pytest tests for an algorithm: ``TestContract = algorithm_contract("rloo")``.

    Args:
        name: of the installed plugin.
        options: its options, as a run would give them.
        group_relative: whether equal rewards in a group give advantages of exactly 0; default: when groups of two or more
            are needed.
        settings: fields of ``Subject``.

    Raises:
        UserError: when pytest or hypothesis is missing.
    """
    return _test_class("algo", name, options, group_relative=group_relative, **settings)


def reward_contract(name: str, options: Mapping[str, Any] | None = None, **settings: Any) -> type:
    """The same for a reward; ``tasks`` (with the ground truths it knows) and ``texts`` are what it judges."""
    return _test_class("reward", name, options, **settings)


def agent_contract(name: str, options: Mapping[str, Any] | None = None, **settings: Any) -> type:
    """The same for an agent; ``tasks`` is what it plays and ``texts`` what the policy says, one after the other."""
    return _test_class("agent", name, options, **settings)


def extension_contract(name: str, options: Mapping[str, Any] | None = None, **settings: Any) -> type:
    """The same for an extension, whichever hooks it has."""
    return _test_class("extension", name, options, **settings)


def tasks_contract(name: str, options: Mapping[str, Any] | None = None, **settings: Any) -> type:
    """The same for a task source."""
    return _test_class("tasks", name, options, **settings)


def tracker_contract(name: str, options: Mapping[str, Any] | None = None, **settings: Any) -> type:
    """The same for a tracker; it is run in directories of its own."""
    return _test_class("tracker", name, options, **settings)


def weight_sync_contract(name: str, options: Mapping[str, Any] | None = None, **settings: Any) -> type:
    """The same for weight sync, with engines in this process; what it refuses to serve is not judged."""
    return _test_class("weight_sync", name, options, **settings)


def kernels_contract(name: str, options: Mapping[str, Any] | None = None, **settings: Any) -> type:
    """The same for kernels, on the GPU where there is one; ``models`` (name → function that makes one) are what they are tried on,
    and what they refuse is not judged."""
    return _test_class("kernels", name, options, **settings)


def _test_class(kind: str, name: str, options: Mapping[str, Any] | None, **settings: Any) -> type:
    for needed in ("pytest", "hypothesis"):
        try:
            importlib.import_module(needed)
        except ModuleNotFoundError as error:
            raise _missing(error) from error
    subject = Subject(kind, name, dict(options or {}), **settings)
    tests = {f"test_{check.name}": _test(check, subject) for check in checks_of(subject)}
    return type("Contract", (), {**tests, "__doc__": f"The contract of {kind} {name!r}.", "subject": subject})


def _test(check: Check, subject: Subject) -> Callable[[Any], None]:
    def test(self: Any) -> None:
        import pytest

        __tracebackhide__ = True
        try:
            check.function(subject)
        except Unusable as unusable:
            if unusable.stage == check.stage:
                raise Broken(str(unusable)) from unusable
            pytest.skip(str(unusable) if unusable.stage == "served" else f"a more basic check fails: {unusable}")
        except ModuleNotFoundError as error:
            if error.name != "peft":
                raise
            pytest.skip(str(_missing(error)))

    test.__doc__ = check.rule
    return test


def _missing(error: ModuleNotFoundError) -> UserError:
    return UserError(
        f"contract suites need {error.name}: pip install 'rlhf-host[{'peft' if error.name == 'peft' else 'testing'}]'"
    )
