"""Refusals of plans that do not fit, with the settings that would."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhf_host import PluginError, UserError
from rlhf_host.internals import PluginSpec, role_flag
from rlhf_host.protocols import RuntimeStart
from rlhf_plan.items import GB
from rlhf_plan.phases import LOAD, Phase, Planner

SMALLEST_BUDGET = 1024
"""Tokens of the smallest micro-batch that is recommended."""
RANK = 16
"""Rank of the adapters that are recommended."""


def problem(phases: Sequence[Phase], planner: Planner, start: RuntimeStart, runtime: Any) -> str | None:
    """Returns what does not fit, and settings that would; None: everything fits, or the memory of a device is unknown."""
    size = planner.device_bytes
    if size is None or not (over := _over(phases, size)):
        return None
    worst, *others = over
    parts = ", ".join(f"{part} {amount / GB:.1f}" for part, amount in worst.parts.items() if amount >= 0.05 * GB)
    ways = _fitting(planner, start, runtime, size)
    more = "a smaller model" if worst.name == LOAD else "more devices, or a smaller model"
    tried = "neither recomputed layers, smaller micro-batches, adapters nor other options of backend and engine"
    advice = f"it would fit with {ways}" if ways else f"{tried} are enough: use {more}"
    also = "".join(f"; {_where(phase)} needs {phase.total / GB:.1f} GB in {phase.name!r}" for phase in others)
    return (
        f"memory: in the phase {worst.name!r} the run needs {worst.total / GB:.1f} GB on each device of {_where(worst)} ({parts}),"
        f" which is more than {100 * worst.usable:.0f} % of its {size / GB:.1f} GB{also}: {advice}"
    )


def _over(phases: Sequence[Phase], size: float) -> list[Phase]:
    """Returns the worst phase of each group of devices on which something does not fit, the worst of all first."""
    worst: dict[str, Phase] = {}
    for phase in sorted(phases, key=lambda phase: phase.total - phase.usable * size, reverse=True):
        if phase.total > (phase.usable + 1e-6) * size:
            worst.setdefault(phase.group.name, phase)
    return list(worst.values())


def _where(phase: Phase) -> str:
    return f"{phase.group.name}={phase.group.devices}"


def _fitting(planner: Planner, start: RuntimeStart, runtime: Any, size: float) -> str:
    """Returns flags with which the plan fits: as few of the known ways as are needed; empty: all of them are not enough."""

    def fits(ways: Sequence[_Way]) -> bool | None:
        changed = start
        try:
            for way in ways:
                changed = way.on(changed)
            return not _over(planner.plan(changed, runtime), size)
        except (PluginError, UserError):  # options that do not go together, or that a model cannot have
            return None

    chosen: list[_Way] = []
    for way in _ways(start):
        more = [each for each in chosen if each.what != way.what] + [way]
        if (enough := fits(more)) is None:
            continue
        chosen = more
        if enough:
            break
    else:
        return ""
    for way in reversed(chosen[:-1]):
        if fits(rest := [each for each in chosen if each is not way]):
            chosen = rest
    return " ".join(way.flags for way in chosen)


@dataclass(frozen=True, slots=True)
class _Way:
    """A way to need less memory. One of the same ``what`` replaces it."""

    what: str
    flags: str
    changes: Mapping[str, Any]

    def on(self, start: RuntimeStart) -> RuntimeStart:
        if self.what in ("budget", "train"):
            return replace(start, train=start.train.model_copy(update=dict(self.changes)))
        if self.what in ("backend", "engine"):
            spec: PluginSpec = getattr(start, self.what)
            changed: Any = {self.what: replace(spec, options={**spec.options, **self.changes})}
            return replace(start, **changed)
        roles = {name: role.model_copy(update=self.changes.get(name, {})) for name, role in start.roles.items()}
        return replace(start, roles=roles)


def _ways(start: RuntimeStart) -> Iterator[_Way]:
    """Yields ways, the plainest first."""
    trained = [need.name for need in start.needs.roles if need.trainable]
    if start.train.keep_logits == "on":
        yield _Way("train", "--train.keep-logits off", {"keep_logits": "off"})
    if plain := [name for name in trained if str(start.roles[name].gradient_checkpointing) not in ("True", "auto")]:
        flags = " ".join(f"--{role_flag(name)}.gradient-checkpointing true" for name in plain)
        yield _Way("checkpointing", flags, {name: {"gradient_checkpointing": True} for name in plain})
    for what in ("engine", "backend"):
        plugin = None if getattr(start, what) is None else getattr(start, what).build()
        for saver in getattr(plugin, "savers", ()):
            options = {name: value for name, value in saver.items() if getattr(plugin.options, name, None) != value}
            if not options:
                continue
            flags = " ".join(f"--{what}.{name.replace('_', '-')} {_text(value)}" for name, value in options.items())
            yield _Way(what, flags, options)
    budget = start.train.max_tokens_per_microbatch
    while (budget := budget // 2) >= SMALLEST_BUDGET:
        yield _Way("budget", f"--train.max-tokens-per-microbatch {budget}", {"max_tokens_per_microbatch": budget})
    whole = [name for name in trained if not start.roles[name].adapts]
    if whole:
        changes = {
            name: {"lora": start.roles[name].lora.model_copy(update={"rank": RANK}), "dtype": "bfloat16"} for name in whole
        }
        flags = " ".join(f"--{role_flag(name)}.lora.rank {RANK} --{role_flag(name)}.dtype bfloat16" for name in whole)
        yield _Way("adapters", flags, changes)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
