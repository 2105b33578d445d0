"""The suites: which checks a plugin gets, running them, and the pytest class made of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_authoring.contracts.subject import CHECKS, Broken, Check, Subject, Unusable
from rlhf_host import UserError
from rlhf_host.commands import asks_to_stop
from rlhf_host.installed import PROTOCOLS


@dataclass(frozen=True, slots=True)
class CheckResult:
    """``passed`` is ``None`` where the check could not run because a more basic one failed; ``message`` says why."""

    name: str
    passed: bool | None
    message: str = ""


LIBRARIES = ("hypothesis", "peft", "pytest")
"""Libraries that checks need beside the host; its extra ``testing`` installs them."""

HOOKED = (
    "found",
    "common",
    "hooked",
    "algorithm",
    "loss",
    "offline",
    "reward",
    "agent",
    "extension",
    "tasks",
    "tracker",
)
"""Modules with the checks of plugins that have hooks. Those with a protocol have the common ones and a module of its name."""

COMMAND = ("found", "command")
"""Those of commands."""

OF_METADATA = ("entry_point_is_unique", "host_dependency_is_bounded", "import_is_light")
"""Checks of what a package says of itself, and of a module that is imported by its name."""

ONLINE, OFFLINE = ("algorithm", "loss"), ("offline",)
"""Those of them for plugins that train on rollouts, and on rows of a data set."""


def all_checks(modules: Sequence[str] = (*HOOKED, *PROTOCOLS, *COMMAND)) -> list[Check]:
    """Every check of the modules."""
    names = [importlib.import_module(f"{__package__}.{module}").__name__ for module in modules]
    return [check for check in CHECKS if check.function.__module__ in names]


def checks_of(subject: Subject) -> list[Check]:
    """The checks that apply: those of all plugins, those of its kind and of its data, and those of the hooks it implements."""
    if subject.kind == "command":
        return all_checks(COMMAND)
    others = ONLINE if subject.offline else OFFLINE
    hooked = [module for module in HOOKED if module not in others]
    checks = all_checks(("found", "common", subject.kind) if subject.kind in PROTOCOLS else hooked)
    if ".py:" in subject.name:  # a class in a file has no metadata
        checks = [check for check in checks if check.name not in OF_METADATA]
    return [check for check in checks if not check.hooks or subject.hooks.intersection(check.hooks)]


def run_contract(kind: str, name: str, options: Mapping[str, Any] | None = None, **settings: Any) -> list[CheckResult]:
    """Every check that applies to the installed plugin, none stopping the others. Needs no pytest.

    Args:
        kind: as ``rlhf plugins --kind`` has it.
        name: the plugin's name.
        options: its options.
        settings: fields of ``Subject``, such as ``tasks`` and ``texts``.
    """
    subject = Subject(kind, name, dict(options or {}), **settings)
    return [run_check(check, subject) for check in checks_of(subject)]


def run_check(check: Check, subject: Subject) -> CheckResult:
    """One check's result; whatever the plugin raises is a failure with its name."""
    try:
        _apply(check, subject)
    except Unusable as unusable:
        return CheckResult(check.name, None, str(unusable))
    except Broken as broken:
        return CheckResult(check.name, False, str(broken))
    except BaseException as error:
        if asks_to_stop(error):
            raise
        return CheckResult(check.name, False, f"{type(error).__name__}: {error}")
    return CheckResult(check.name, True)


def _apply(check: Check, subject: Subject) -> None:
    """Raises ``Unusable`` where the check cannot be made, and anything else where the plugin fails it."""
    try:
        check.function(subject)
    except Unusable as unusable:
        if unusable.stage == check.stage:
            raise Broken(str(unusable)) from unusable
        raise
    except ModuleNotFoundError as error:
        if error.name in LIBRARIES:
            raise Unusable("served", str(_missing(error))) from error
        raise


def _suite(kind: str, about: str) -> Callable[..., type]:
    def contract(name: str, options: Mapping[str, Any] | None = None, **settings: Any) -> type:
        for needed in ("pytest", "hypothesis"):
            try:
                importlib.import_module(needed)
            except ModuleNotFoundError as error:
                raise _missing(error) from error
        subject = Subject(kind, name, dict(options or {}), **settings)
        tests = {f"test_{check.name}": _test(check, subject) for check in checks_of(subject)}
        return type("Contract", (), {**tests, "__doc__": f"The contract of {kind} {name!r}.", "subject": subject})

    contract.__doc__ = f"""A class of pytest tests for an installed {kind}: ``TestContract = ..._contract("NAME")``.

    ``options`` are the plugin's, as a run would give them; settings are fields of ``Subject``. {about}

    Raises:
        UserError: when pytest or hypothesis is missing.
    """
    return contract


algorithm_contract = _suite(
    "algo",
    "Where it needs groups of two or more, equal rewards must give advantages of exactly 0. Where it trains on a data set, the"
    " checks are those of its units.",
)
reward_contract = _suite("reward", "``tasks`` (with the ground truths it knows) and ``texts`` are what it judges.")
agent_contract = _suite("agent", "``tasks`` is what it plays and ``texts`` what the policy says, one after the other.")
extension_contract = _suite("extension", "The checks are those of the hooks it has.")
tasks_contract = _suite("tasks", "Both splits are read.")
tracker_contract = _suite("tracker", "It is run in directories of its own.")
weight_sync_contract = _suite("weight_sync", "Engines are in this process; what it refuses to serve is not judged.")
kernels_contract = _suite(
    "kernels", "``models`` (name → function that makes one) are what they are tried on, on the GPU if any."
)
engine_contract = _suite("engine", "It samples from a tiny Llama; one engine is up at a time.")
backend_contract = _suite("backend", "It trains a tiny Llama, in one process and in two.")
command_contract = _suite("command", "``name`` is as it is typed, ``plugins.new`` for ``rlhf plugins new``.")
runtime_contract = _suite("runtime", "It is compared with the local one; ``placement`` as a run would give it.")


def _test(check: Check, subject: Subject) -> Callable[[Any], None]:
    def test(self: Any) -> None:
        import pytest

        __tracebackhide__ = True
        try:
            _apply(check, subject)
        except Unusable as unusable:
            pytest.skip(str(unusable) if unusable.stage == "served" else f"a more basic check fails: {unusable}")

    test.__doc__ = check.rule
    return test


def _missing(error: ModuleNotFoundError) -> UserError:
    return UserError(f"contract suites need {error.name}: pip install 'rlhf-host[testing]'")
