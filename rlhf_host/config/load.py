"""From files, presets and flags to one ``RunConfig``, and from what is wrong with it to one line per mistake."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, TypeAlias

from pydantic import ValidationError

from rlhf_host.config.flag_names import of_last_part, of_plugin
from rlhf_host.config.flags import Flag, from_flags, parse
from rlhf_host.config.merge import DEFAULT, layer, merge
from rlhf_host.config.named import settings_of
from rlhf_host.config.problems import Origins, Path, Problems
from rlhf_host.config.schema import RunConfig, defaults
from rlhf_host.config.tree import SHORTHANDS, SINGLE, Names, annotation_at, fields_of
from rlhf_host.config.yaml_file import Located, located, plain, read_yaml
from rlhf_host.errors import near_matches
from rlhf_host.plugins.hints import UnknownName, of_flag, of_nobody, of_packages, of_place
from rlhf_host.plugins.options import nested_model, sentence

QUICKSTART = "quickstart"


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration, where each of its values was set, and what the person should be told."""

    config: RunConfig
    origins: Origins
    notices: tuple[str, ...] = ()


Configs: TypeAlias = str | FilePath | Located | Sequence[str | FilePath | Located]
"""Settings from somewhere: what ``--config`` names, a file as ``Path``, or settings that were read; later ones override."""


def load_config(configs: Configs = (), flags: Sequence[str] = ()) -> RunConfig:
    """The configuration of these settings, which flags override. Plugins' own options stay as written.

    Raises:
        UserError: one line per mistake, each with file and line, or flag.
    """
    return read_config(configs, parse(flags)).config


def read_config(
    configs: Configs = (), flags: Sequence[Flag] = (), control: Collection[str] = (), *, quickstart: bool = True
) -> LoadedConfig:
    """As ``load_config``, keeping the places.

    With neither a model nor data, everything overrides the preset ``quickstart``, and a notice says so.

    Args:
        control: the command's own flags, for near matches.
        quickstart: whether a run without model and data gets the preset.
    """
    problems = Problems()
    values, problems.origins = unwrap(assemble(configs, flags, problems, control, quickstart=quickstart))
    config = RunConfig()
    try:
        config = RunConfig.model_validate(values, by_alias=True, by_name=False)
    except ValidationError as error:
        _add_misfits(problems, error, control)
    problems.refuse()
    return LoadedConfig(config, problems.origins, tuple(problems.notices))


def assemble(
    configs: Configs, flags: Sequence[Flag], problems: Problems, control: Collection[str] = (), *, quickstart: bool = True
) -> Located:
    """All layers as one."""
    names = Names()
    layers = []
    for each in [configs] if isinstance(configs, str | FilePath | Located) else configs:
        tree = each if isinstance(each, Located) else settings_of(each) if isinstance(each, str) else read_yaml(each)
        layers.append(layer(tree, names, problems))
    layers.append(from_flags(flags, names, problems, control))
    if quickstart and not any(_has(each, "roles", "actor", "model") or _has(each, "data", "sources") for each in layers):
        layers.insert(0, layer(settings_of(f"preset:{QUICKSTART}"), names, problems))
        problems.notices.append(
            f"Neither --model nor --data is given: using the preset {QUICKSTART!r}, a tiny model on arithmetic."
        )
    tree = located(defaults(), DEFAULT)
    for each in layers:
        tree = merge(tree, each, problems)
    for key in SINGLE:
        if key in tree.value and "name" not in tree.value[key].value and key != "sync":
            options = tree.value.pop(key)
            place = next((option.where for option in options.value.values()), options.where)
            problems.add(place, f"no {key} is chosen; add --{key} NAME{of_place(place, plain(options))}")
    return tree


def _has(tree: Located, *path: str) -> bool:
    for key in path:
        if not isinstance(tree.value, dict) or key not in tree.value:
            return False
        tree = tree.value[key]
    return tree.value not in (None, [])


def unwrap(tree: Any, path: Path = ()) -> tuple[Any, dict[Path, str]]:
    """Plain values, and for each path the place that set it."""
    if not isinstance(tree, Located):  # in a list that a flag gave
        return tree, {}
    origins = {path: tree.where} if tree.where != DEFAULT else {}
    if not isinstance(tree.value, dict | list):
        return tree.value, origins
    pairs = tree.value.items() if isinstance(tree.value, dict) else enumerate(tree.value)
    values = {}
    for key, item in pairs:
        values[key], inside = unwrap(item, (*path, key))
        origins |= inside
    return values if isinstance(tree.value, dict) else type(tree.value)(values.values()), origins


def _add_misfits(problems: Problems, error: ValidationError, control: Collection[str]) -> None:
    """Adds what does not fit the schema. ``control``: flags that are no keys."""
    for item in error.errors(include_url=False):
        path = item["loc"]
        problem = f"{path[-1]} is required" if item["type"] == "missing" else sentence(item)
        if item["type"] == "extra_forbidden":
            key, dotted = str(path[-1]), ".".join(map(str, path))
            hint = f"; it is a flag alone: --{key}" if dotted in control else of_flag(dotted) or of_last_part(key)
            hint = hint or ("" if path[:-1] else of_plugin(key.replace("_", "-")))
            hint = hint or near_matches(key, _known(path[:-1])) or of_packages(UnknownName("section", dotted)) or of_nobody()
            problem = f"no such key{hint}"
        problems.add(path, problem)


def _known(path: Path) -> list[str]:
    model = nested_model(annotation_at(path))
    return [*(fields_of(model) if model else ()), *(() if path else (*SHORTHANDS, *Names().plugins))]
