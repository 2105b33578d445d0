"""Requests of plugins after a step: stop the run, or change numbers while it goes on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real

from rlhf_host.errors import RunError
from rlhf_host.records.needs import Adjust, Stop


@dataclass(slots=True)
class Adjustments:
    """Requests of all plugins after one step, each one checked."""

    stop: str | None = None
    """Plugin that ends the run, and its reason."""
    rates: dict[str, float] = field(default_factory=dict)
    """Role → its new peak learning rate."""
    options: dict[str, dict[str, float]] = field(default_factory=dict)
    """Plugin → its options."""


def adjustments(
    answers: Iterable[tuple[str, Stop | Adjust]], step: int, roles: Sequence[str], adjustable: Mapping[str, str]
) -> Adjustments:
    """Reads the answers to ``step_finished``.

    Args:
        answers: by plugin.
        step: for messages.
        roles: the trained roles.
        adjustable: alias → plugin, for plugins with the hook ``adjust``.

    Raises:
        RunError: a setting does not exist, cannot have the value, or two plugins set it.
    """
    found = Adjustments()
    wanted: dict[str, tuple[str, float]] = {}
    for key, answer in answers:
        if isinstance(answer, Stop):
            found.stop = found.stop or f"{key}: {answer.reason}"
            continue
        for name, value in answer.settings.items():
            if name in wanted:
                raise RunError(f"{wanted[name][0]} and {key} both adjust {name} after step {step}: leave one out")
            if isinstance(value, bool) or not isinstance(value, Real):
                raise RunError(f"{key} adjusts {name} to {value!r} after step {step}, expected a number")
            wanted[name] = (key, float(value))
    rates = {f"{role}.lr": role for role in roles}
    for name, (key, value) in wanted.items():
        alias, _, option = name.partition(".")
        if name not in rates and alias not in adjustable:
            choices = ", ".join([*rates, *(f"{owner}.NAME" for owner in adjustable)])
            raise RunError(f"{key} adjusts {name}, which does not exist; there is {choices}")
        if not math.isfinite(value) or (name in rates and value < 0):
            least = " that is 0 or more" if name in rates else ""
            raise RunError(f"{key} adjusts {name} to {value:g} after step {step}, expected a finite number{least}")
        if name in rates:
            found.rates[rates[name]] = value
        else:
            found.options.setdefault(adjustable[alias], {})[option] = value
    return found
