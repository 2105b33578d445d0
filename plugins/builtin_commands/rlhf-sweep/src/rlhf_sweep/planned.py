"""Runs of a sweep: each combination resolved and checked as ``rlhf train`` does it, before anything runs."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

from rlhf_host import UserError
from rlhf_host.settings import Flag, Located, Names, RunConfig, check, merge_needs, read_config, resolve
from rlhf_sweep.request import Request, with_values
from rlhf_sweep.space import label

LONGEST = 100
"""Characters of a run's name."""
MOST_LINES = 20


@dataclass(frozen=True, slots=True)
class Planned:
    """One run. ``settings`` are the varied ones, without the seed."""

    name: str
    settings: dict[str, Any]
    seed: int | None
    config: RunConfig

    @property
    def identity(self) -> str:
        """Hash of all settings but those that only name the run."""
        return hashlib.sha256(json.dumps(plain_settings(self.config), sort_keys=True).encode()).hexdigest()


def plain_settings(config: RunConfig) -> dict[str, Any]:
    """Returns all settings but those that only name the run."""
    return {name: value for name, value in config.model_dump(mode="json").items() if name not in ("name", "run_dir")}


def planned(request: Request, combinations: Iterable[Mapping[str, Any]]) -> tuple[list[Planned], list[str]]:
    """Returns the runs of these combinations, and what is to be said of them.

    Raises:
        UserError: some cannot work: all mistakes, each once.
    """
    problems: Counter[str] = Counter()
    examples: dict[str, str] = {}
    notices: dict[str, None] = {}
    found: list[Planned] = []
    count = 0
    for values in combinations:
        count += 1
        try:
            config, said = _checked(request, values)
        except UserError as error:
            for line in str(error).split("\n"):
                problems[line] += 1
                examples.setdefault(line, told(values))
            continue
        notices.update(dict.fromkeys(said))
        for seed in request.seeds or (None,):
            seeded = config if seed is None else config.model_copy(update={"seed": seed})
            found.append(Planned(run_name(values, config.seed if seed is None else seed), dict(values), seed, seeded))
    if problems:
        lines = [
            line if number == count else f"{line} (in {number} of {count} combinations, such as {examples[line]})"
            for line, number in problems.items()
        ]
        more = [f"and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
        raise UserError("\n".join([*lines[:MOST_LINES], *more]))
    _refuse_equal(found)
    return _with_own_names(found), list(notices)


def _checked(request: Request, values: Mapping[str, Any]) -> tuple[RunConfig, list[str]]:
    layers, flags = with_values(request, values, request.seeds[0] if request.seeds else None)
    loaded = read_config(layers, flags)
    _refuse_overridden(request, layers, flags, loaded.origins)
    run = resolve(loaded.config, loaded.origins)
    with closing(run.plugins()) as manager:
        warnings = check(run, manager, merge_needs(manager))
    return run.config, [*loaded.notices, *(f"Warning: {line}" for line in warnings)]


def _refuse_overridden(
    request: Request, layers: Sequence[Any], flags: Sequence[Flag], origins: Mapping[tuple[str | int, ...], str]
) -> None:
    """Raises ``UserError`` where an alternative's value is not among the settings: the run would be named after what it has not."""
    used, names = set(origins.values()), Names()
    for tree in layers[len(request.configs) :]:
        for keys, place, value in _written(tree):
            if place in used:
                continue
            others = _overriding(request, place, layers, flags)
            if value in (None, []) or (isinstance(value, str) and value.rpartition("=")[2] == "none"):
                # Leaves no trace where nothing was to be taken away, so what is there counts.
                path = (*names.place(str(keys[0]))[0], *keys[1:])
                others = others or next((where for each, where in origins.items() if each[: len(path)] == path), None)
                if others is None:
                    continue
            raise UserError(
                f"{place} is overridden by {others}: leave one out" if others else f"{place} has no effect: leave it out"
            )


def _written(tree: Located, keys: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], str, Any]]:
    """Yields keys, place and value of each leaf."""
    value = tree.value
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inside:
        yield from _written(item, (*keys, key.replace("-", "_") if isinstance(key, str) else key))
    if value != {} and not (isinstance(value, dict | list) and value):
        yield keys, tree.where, value


def _overriding(request: Request, place: str, layers: Sequence[Any], flags: Sequence[Flag]) -> str | None:
    """Returns the flag or alternative without which the value at the place would count."""
    varied = {f"--{each.name.replace('_', '-')}": each.where for each in request.varied}
    attempts: dict[str, tuple[Sequence[Any], Sequence[Flag]]] = {
        varied.get(flag.text, flag.text): (layers, [each for each in flags if each.text != flag.text]) for flag in flags
    }
    for tree in layers[len(request.configs) :]:
        attempts[tree.where] = ([each for each in layers if each is not tree], flags)
    for shown, (fewer_layers, fewer_flags) in attempts.items():
        with suppress(UserError):
            if place in read_config(fewer_layers, fewer_flags).origins.values():
                return shown
    return None


def told(values: Mapping[str, Any]) -> str:
    """Returns settings in one line."""
    return ", ".join(f"{name} {label(value)}" for name, value in values.items()) or "the settings"


def run_name(values: Mapping[str, Any], seed: int) -> str:
    """Returns a name that says the settings and is good for a folder."""
    lasts = Counter(name.rpartition(".")[2] for name in values)
    parts = [
        (name if lasts[name.rpartition(".")[2]] > 1 else name.rpartition(".")[2], label(value))
        for name, value in values.items()
    ]
    whole = "_".join(f"{name}-{text}" for name, text in [*parts, ("seed", str(seed))])
    plain = re.sub(r"[^A-Za-z0-9_.+-]+", "-", whole)
    if plain == whole and len(plain) <= LONGEST:
        return plain
    return f"{plain[:LONGEST].strip('-.')}-{hashlib.sha256(whole.encode()).hexdigest()[:6]}"


def _refuse_equal(found: Sequence[Planned]) -> None:
    """Raises ``UserError`` where two runs are the same: their results would count twice."""
    known: dict[str, Planned] = {}
    lines = []
    for each in found:
        if (first := known.setdefault(each.identity, each)) is not each:
            lines.append(f"{told(each.settings)} is the same run as {told(first.settings)}: leave one out")
    if lines:
        raise UserError("\n".join(dict.fromkeys(lines)))


def _with_own_names(found: Sequence[Planned]) -> list[Planned]:
    return [Planned(each.name, each.settings, each.seed, each.config.model_copy(update={"name": each.name})) for each in found]
