"""The strictest level of containment that holds on this machine: it is tried with every attack, once per process."""

from __future__ import annotations

import logging
import os

from rlhf_host import UserError
from rlhf_plugin_code_exec.attacks import COUNT
from rlhf_plugin_code_exec.checks import escapes
from rlhf_plugin_code_exec.interpreters import interpreter_at, is_within
from rlhf_plugin_code_exec.runner import JailFailed, Level, Limits, Runner
from rlhf_plugin_code_exec.shell_checks import shell_escapes
from rlhf_plugin_code_exec.shells import home
from rlhf_plugin_code_exec.suites import suite_of

log = logging.getLogger(__name__)
LEVELS: tuple[Level, ...] = ("A", "B")
_TRIED: dict[tuple[str, bool], Level] = {}
"""Interpreter, and whether shells were tried, too → level at which no attack got out."""


async def strictest_level(who: str, runner: Runner, *, trust: bool = False, shells: bool = False) -> Level:
    """Returns the level, which the runner has from now on.

    Args:
        who: the plugin that asks, as it is called in settings, for messages.
        trust: without a level that holds, return ``none``: programs are not contained.
        shells: try shells, too.

    Raises ``UserError`` if none holds.
    """
    if (known := _TRIED.get((runner.python, shells))) is not None:
        runner.level = known
        return known
    why = ""
    for level in LEVELS:
        runner.level = level
        try:
            escaped = await _escaped(runner, level, shells)
        except JailFailed as failure:
            why = str(failure)
            continue
        if escaped:
            why = f"these programs were not contained: {', '.join(escaped)}"
            continue
        _TRIED[runner.python, shells] = level
        if is_within(os.getcwd(), interpreter_at(runner.python).readable):
            log.warning("%s: programs can read %s, as all of the system's folders", who, os.getcwd())
        log.warning("%s: %s runs programs, contained at level %s (%d attacks tried)", who, runner.python, level, COUNT)
        return level
    if trust:
        log.warning("%s: programs are NOT contained (trust): %s", who, why)
        runner.level = "none"
        return "none"
    raise UserError(
        f"{who} cannot contain programs on this machine: {why}. It needs Linux with Landlock (5.13 or later) on x86_64 or"
        " aarch64, and an interpreter that other users can reach (its option python, such as /usr/bin/python3)"
    )


async def shell_level(who: str, python: str, *, trust: bool = False) -> Level:
    """Returns the level for shells, as ``strictest_level`` does. Raises ``UserError``."""
    limits = Limits(seconds=10.0, cpu_s=10, memory=512 << 20, processes=8)
    return await strictest_level(who, Runner(python, limits, at_once=2), trust=trust, shells=True)


async def _escaped(runner: Runner, level: Level, shells: bool) -> list[str]:
    told = (await runner.tests("def f(): return 3", suite_of("", "assert f() == 3")))["results"][0]
    if '"passed": 1' not in told.get("verdict", ""):
        raise JailFailed(f"a harmless program does not run: {told}")
    escaped = await escapes(runner)
    if shells and not escaped:
        escaped = await shell_escapes(runner.python, level, home(runner.python) if level == "A" else "")
    return escaped
