"""The reward of an episode: what its tests report in files, as Harbor's do, or else their exit code."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field

from rlhf_plugin_code_exec.shells import Ran

REPORTS = ("reward.json", "reward.txt")
"""Files in the folder of logs, in the order in which they count."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Reward of an episode, and why it is so."""

    reward: float
    parts: dict[str, float] = field(default_factory=dict)
    """All numbers of a report with several."""
    problem: str = ""


def verdict(ran: Ran, reports: dict[str, bytes | None], only_reported: bool) -> Verdict:
    """Returns the verdict of tests. Where they did not end or wrote no number, the reward is 0: the policy may be the reason.

    Args:
        reports: name of ``REPORTS`` → its content, if tests wrote it.
        only_reported: without a report the reward is 0, whatever the exit code.
    """
    if ran.why != "ended":
        return Verdict(0.0, problem=f"the tests were ended: {ran.why}")
    for name in REPORTS:
        content = reports.get(name)
        if content is None:
            continue
        try:
            return _read(name, content.decode())
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            return Verdict(0.0, problem=f"{name} cannot be read: {error}")
    if only_reported:
        return Verdict(0.0, problem=f"the tests wrote neither {' nor '.join(REPORTS)}")
    return Verdict(float(ran.code == 0))


def _read(name: str, text: str) -> Verdict:
    if name == "reward.txt":
        return Verdict(_number(float(text)))
    given = json.loads(text)
    if not isinstance(given, dict):
        return Verdict(_number(given))
    parts = {key: _number(value) for key, value in given.items()}
    if "reward" in parts:
        return Verdict(parts["reward"], parts)
    if len(parts) != 1:
        raise ValueError(f"it has {', '.join(parts) or 'no number'}; one of several is called reward")
    return Verdict(next(iter(parts.values())), parts)


def _number(value: object) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no finite number")
    return float(value)
