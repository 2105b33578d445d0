"""Reads what a person asks for: from flags and a file to one ``Request``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_host import UserError
from rlhf_host.commands import near_matches
from rlhf_host.settings import CommandLine, Flag, Located, plain, read_yaml
from rlhf_sweep.samplers import OF_OPTUNA, SAMPLERS, require_optuna
from rlhf_sweep.space import Range, Varied, read_text, read_value, whole_numbers

VARY = "vary"
FLAGS = ("seeds", "by", "sampler", "trials", "sampler-seed", "limit", "at-once", "on", "failed", "output")
"""Flags of the sweep that a file may have too, with underscores, but for ``failed``."""
KEYS = ("config", "settings", VARY, *(name.replace("-", "_") for name in FLAGS if name != "failed"))
LIMIT = 100
OWN = {
    "run_dir": "the sweep gives each run its folder: --output names that of the sweep",
    "output": "the sweep gives each run its folder: --output names that of the sweep",
    "name": "the sweep names its runs",
}
"""Settings that the sweep decides."""


@dataclass(frozen=True, slots=True)
class Request:
    """A sweep, as it was asked for."""

    configs: tuple[Any, ...]
    """Settings of every run, before flags."""
    flags: tuple[Flag, ...]
    """Flags that every run has."""
    varied: tuple[Varied, ...]
    seeds: tuple[int, ...] | None
    """None: one run of each combination, with the seed that the settings have."""
    by: str | None
    sampler: str | None
    trials: int | None
    sampler_seed: int
    limit: int
    at_once: int | None
    on: str
    retry: bool
    """Failed runs are tried again."""
    output: str | None


def read_request(line: CommandLine, short: Mapping[str, str]) -> Request:
    """Returns what the flags and the file, if there is one, ask for.

    Raises:
        UserError: something cannot be meant.
    """
    file = {} if line.file is None else _file(line.file)
    flags = [flag for flag in line.flags if flag.keys[0] != VARY]
    varied = {each.name: each for each in _of_file(file.get(VARY), short)}
    of_flags = list(_of_flags([flag for flag in line.flags if flag.keys[0] == VARY], short))
    varied |= {each.name: each for each in of_flags}
    fixed = {".".join(flag.keys): flag.text for flag in flags}
    for name, why in OWN.items():
        if name in fixed or name in varied:
            raise UserError(f"{fixed.get(name) or varied[name].where}: {why}")
    for name, each in varied.items():
        if name in fixed:
            raise UserError(f"{fixed[name]} is set, and {each.where} varies it: leave one out")
    own = {name: _value(line, file, name) for name in FLAGS}
    seeds = None if own["seeds"] is None else tuple(whole_numbers(own["seeds"], _where(line, file, "seeds")))
    if "seed" in varied or (seeds is not None and "seed" in fixed):
        raise UserError("seeds are given as --seeds 0,1,2 or 0..2: runs that differ in nothing else are averaged")
    sampler, on = own["sampler"], own["on"] or "local"
    if sampler is not None and sampler not in SAMPLERS:
        raise UserError(f"--sampler {sampler}: there are {', '.join(SAMPLERS)}{near_matches(sampler, SAMPLERS)}")
    if on not in ("local", "ray"):
        raise UserError(f"--on {on}: it is local or ray")
    if (failed := own["failed"]) not in (None, "keep", "retry"):
        raise UserError(f"--failed {failed}: it is keep or retry")
    trials = _count(own["trials"], "--trials", 1)
    if sampler in OF_OPTUNA:
        require_optuna(sampler)
    if sampler is not None and trials is None:
        raise UserError(f"--sampler {sampler} draws settings: say how many, as in --trials 20")
    if sampler is None and trials is not None:
        raise UserError(
            "--trials says how many settings a sampler draws: add --sampler random, or leave it out for the whole grid"
        )
    if sampler is None:
        for each in varied.values():
            if isinstance(each.space, Range):
                raise UserError(
                    f"{each.where} has no number of values: add one (LOW..HIGH:log:4), or draw with --sampler random --trials 20"
                )
    if sampler is not None and not varied:
        raise UserError(f"--sampler {sampler}: nothing is varied to draw from: add --{VARY}.SETTING")
    if not varied and len(seeds or ()) < 2:
        raise UserError(
            f"that is one run: vary a setting (--{VARY}.actor.lr 1e-5,1e-4) or give seeds (--seeds 0..2); rlhf train does one"
        )
    return Request(
        configs=(*_configs(line, file), *([file["settings"]] if "settings" in file else [])),
        flags=tuple(flags),
        varied=tuple(varied[name] for name in sorted(varied, key=_order)),
        seeds=seeds,
        by=own["by"],
        sampler=sampler,
        trials=trials,
        sampler_seed=_count(own["sampler-seed"], "--sampler-seed", 0) or 0,
        limit=_count(own["limit"], "--limit", 1) or LIMIT,
        at_once=_count(own["at-once"], "--at-once", 1),
        on=on,
        retry=failed == "retry",
        output=own["output"],
    )


def _order(name: str) -> tuple[bool, str]:
    """Algorithms come first, then names in their order: flags and files in any order give the same sweep."""
    return name != "algo", name


def _file(name: str) -> dict[str, Located]:
    tree = read_yaml(name).value
    keys = {key.replace("-", "_"): value for key, value in tree.items()}
    for key, value in keys.items():
        if key not in KEYS:
            raise UserError(
                f"{value.where}: no such key{near_matches(key, KEYS)}; settings of the runs go below 'settings:', what is"
                f" varied below '{VARY}:'"
            )
    for key in ("settings", VARY):
        if key in keys and not isinstance(keys[key].value, dict):
            raise UserError(f"{keys[key].where}: should be a mapping of settings")
    return keys


def _of_file(tree: Located | None, short: Mapping[str, str]) -> Iterator[Varied]:
    for name, each in {} if tree is None else tree.value.items():
        yield Varied(_long(name, short), each.where, read_value(plain(each), each.where))


def _of_flags(flags: Sequence[Flag], short: Mapping[str, str]) -> Iterator[Varied]:
    seen: dict[str, str] = {}
    for flag in flags:
        name = _long(flag.name.partition(".")[2], short)
        if not name:
            raise UserError(f"{flag.text}: name the setting: --{VARY}.actor.lr 1e-5,1e-4")
        if flag.value is None:
            raise UserError(f"{flag.text} needs values, such as 1e-5,1e-4")
        if name in seen:
            raise UserError(f"{flag.text} and {seen[name]} vary the same: give the alternatives once, with commas")
        seen[name] = flag.text
        yield Varied(name, flag.text, read_text(flag.value, flag.text))


def _long(name: str, short: Mapping[str, str]) -> str:
    long = short.get(name.replace("_", "-"), name)
    return long.replace("-", "_")


def _value(line: CommandLine, file: Mapping[str, Located], name: str) -> str | None:
    """Returns a flag of the sweep, or what its file has."""
    typed = line.value(name)
    if typed is not None or (tree := file.get(name.replace("-", "_"))) is None:
        return typed
    value = plain(tree)
    if isinstance(value, list) and name == "seeds":
        return ",".join(map(str, value))
    if isinstance(value, bool | dict | list) or value is None:
        raise UserError(f"{tree.where}: should be a number or a word, not {value!r}")
    return str(value)


def _where(line: CommandLine, file: Mapping[str, Located], name: str) -> str:
    return f"--{name}" if line.value(name) is not None else file[name].where


def _count(text: str | None, flag: str, least: int) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or int(text) < least:
        raise UserError(f"{flag} {text}: it is a whole number{f', at least {least}' if least else ''}")
    return int(text)


def _configs(line: CommandLine, file: Mapping[str, Located]) -> list[str]:
    if line.configs or "config" not in file:
        return line.configs
    value = plain(file["config"])
    names = value if isinstance(value, list) else [value]
    if not all(isinstance(name, str) for name in names):
        raise UserError(f"{file['config'].where}: should be a file, preset or recipe, or a list of them")
    return names


def with_values(request: Request, values: Mapping[str, Any], seed: int | None) -> tuple[list[Any], list[Flag]]:
    """Returns layers and flags of a run with these values. What can be a flag is one, and means what it means in ``rlhf train``;
    mappings, lists and texts with commas are layers of a file."""
    layers, flags = list(request.configs), list(request.flags)
    where = {each.name: each.where for each in request.varied}
    for name, value in values.items():
        if isinstance(value, dict | list) or (isinstance(value, str) and "," in value):
            tree = _located(value, where[name])
            for part in reversed(name.split(".")):
                tree = Located({part: tree}, where[name])
            layers.append(tree)
        else:
            flags.append(_flag(name, value))
    if seed is not None:
        flags.append(_flag("seed", seed))
    return layers, flags


def _located(value: Any, where: str) -> Located:
    """Each value has a place of its own, so that the origins of a run's settings say which of them counted."""
    if isinstance(value, dict):
        return Located({key: _located(item, f"{where}[{key}]") for key, item in value.items()}, where)
    if isinstance(value, list):
        return Located([_located(item, f"{where}[{number}]") for number, item in enumerate(value)], where)
    return Located(value, where)


def _flag(name: str, value: Any) -> Flag:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return Flag(name.replace("_", "-"), text)
