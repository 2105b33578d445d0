"""From presets, a YAML file and flags to one ``RunConfig``, and from what is wrong with it to one line per mistake."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import Any, TypeAlias

from pydantic import ValidationError

from rlhf_host.config.environments import environment_layer
from rlhf_host.config.flag_names import of_last_part, of_plugin
from rlhf_host.config.flags import Flag, from_flags, parse
from rlhf_host.config.merge import DEFAULT, layer, merge
from rlhf_host.config.schema import RunConfig, defaults
from rlhf_host.config.tree import SHORTHANDS, SINGLE, Names, Path, annotation_at, fields_of, section_model
from rlhf_host.config.yaml_file import Located, located, plain, read_yaml
from rlhf_host.errors import PluginError, UserError, near_matches
from rlhf_host.plugins.discovery import preset_file
from rlhf_host.plugins.hints import of_flag, of_place, of_section
from rlhf_host.plugins.selection import find

QUICKSTART = "quickstart"

Origins: TypeAlias = Mapping[Path, str]
"""Where each value was set: ``--rollout.n``, or ``run.yaml:12: rollout.n``."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration, where each of its values was set, and what the person should be told."""

    config: RunConfig
    origins: Origins
    notices: tuple[str, ...] = ()


def load_config(path: str | FilePath | None = None, flags: Sequence[str] = (), presets: Sequence[str] = ()) -> RunConfig:
    """The configuration of a file: flags override it, and it overrides presets. Plugins' own options stay as written.

    Raises:
        UserError: one line per mistake, each with file and line, or flag.
    """
    return read_config(path, parse(flags), presets).config


def read_config(
    path: str | FilePath | Located | None = None,
    flags: Sequence[Flag] = (),
    presets: Sequence[str] = (),
    control: Collection[str] = (),
    *,
    settings: Located | None = None,
    quickstart: bool = True,
    sections: Collection[str] = (),
) -> Loaded:
    """As ``load_config``, keeping the places.

    With neither a model nor data, everything overrides the preset ``quickstart``, and a notice says so.

    Args:
        control: the command's own flags, for near matches.
        settings: from Python, in the form of a file; they override all others.
        quickstart: whether a run without model and data gets the preset.
        sections: all that is taken of the file; default: everything.
    """
    errors: list[str] = []
    tree, notices = assemble(path, flags, presets, errors, control, settings, quickstart, sections)
    values, origins = unwrap(tree)
    config = RunConfig()
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        errors += validation_lines(error, origins, control=control)
    fail(errors)
    return Loaded(config, origins, notices)


def assemble(
    path: str | FilePath | Located | None,
    flags: Sequence[Flag],
    presets: Sequence[str],
    errors: list[str],
    control: Collection[str] = (),
    settings: Located | None = None,
    quickstart: bool = True,
    sections: Collection[str] = (),
) -> tuple[Located, tuple[str, ...]]:
    """All layers as one, and notices. Mistakes are appended to ``errors``."""
    names = Names()
    layers = [layer(_preset(preset), names, errors) for preset in presets]
    if path is not None:
        file = path if isinstance(path, Located) else read_yaml(path)
        if sections:
            file = replace(file, value={key: value for key, value in file.value.items() if key in sections})
        layers.append(layer(file, names, errors))
    notices: list[str] = []
    layers.append(from_flags(flags, names, errors, notices, control))
    if settings is not None:
        layers.append(layer(settings, names, errors))
    if quickstart and not any(_has(each, "roles", "actor", "model") or _has(each, "data", "sources") for each in layers):
        layers.insert(0, layer(_preset(QUICKSTART), names, errors))
        notices.append(
            f"Neither --actor.model nor --data is given: using the preset {QUICKSTART!r}, a tiny model on arithmetic."
        )
    tree = located(defaults(), DEFAULT)
    for each in layers:
        tree = merge(tree, each, errors)
    for key in SINGLE:
        if key in tree.value and "name" not in tree.value[key].value and key != "sync":
            options = tree.value.pop(key)
            place = next((option.where for option in options.value.values()), options.where)
            errors.append(f"{place}: no {key} is chosen; add --{key} NAME{of_place(place, plain(options))}")
    return tree, tuple(notices)


def _preset(name: str) -> Located:
    """A preset by its entry point's name, or a YAML file; or an environment, by name or as a Python file."""
    if name.endswith((".yaml", ".yml")):
        return read_yaml(name)
    if name.endswith(".py"):
        return environment_layer(FilePath(name).expanduser().absolute(), name)
    try:
        info = find("preset", name)
    except PluginError as error:
        raise UserError(f"--preset {name}: {error}") from error
    file = preset_file(info)
    if file is None:
        raise UserError(f"--preset {name}: {info.problem}")
    return environment_layer(file, f"preset {name}") if file.suffix == ".py" else read_yaml(file, f"preset {name}")


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


# --- messages -----------------------------------------------------------------------------------


def fail(lines: Iterable[str], kind: type[UserError] = UserError) -> None:
    """Raise one error holding all ``lines``, if there are any."""
    unique = list(dict.fromkeys(lines))
    if unique:
        raise kind("\n".join(unique))


def where(path: Path, origins: Origins) -> str:
    """The place that set ``path``, or the nearest around it; else the dotted path."""
    near = (origins.get(path[:end]) for end in range(len(path), 0, -1))
    return next(filter(None, near), ".".join(map(str, path)))


def validation_lines(
    error: ValidationError, origins: Origins, root: Path = (), whose: str = "", control: Collection[str] = ()
) -> list[str]:
    """``PLACE: what is wrong`` for each mistake.

    Args:
        root: where the validated value is in the configuration.
        whose: the plugin with these options.
        control: flags that are no keys.
    """
    lines = []
    for item in error.errors(include_url=False):
        path = (*root, *item["loc"])
        problem = f"{path[-1]} is required" if item["type"] == "missing" else _sentence(item)
        if item["type"] == "missing" and whose:
            problem = f"{whose} needs {'.'.join(map(str, item['loc']))!r}"
        if item["type"] == "extra_forbidden":
            key, dotted = str(path[-1]), ".".join(map(str, path))
            hint = f"; it is a flag alone: --{key}" if dotted in control else of_flag(dotted) or of_last_part(key)
            hint = hint or ("" if path[:-1] else of_plugin(key.replace("_", "-")))
            problem = f"no such key{hint or near_matches(key, _known(path[:-1])) or of_section(dotted)}"
        lines.append(f"{where(path, origins)}: {problem}")
    return lines


def _known(path: Path) -> list[str]:
    model = section_model(annotation_at(path))
    return [*(fields_of(model) if model else ()), *(() if path else (*SHORTHANDS, *Names().plugins))]


def _sentence(item: Any) -> str:
    message = item["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ").split(", unable to parse")[0]
    shown = repr(item["input"])
    shown = shown if len(shown) <= 80 else f"{shown[:60]}… ({len(shown)} characters)"
    if item["type"] in ("model_type", "dict_type"):
        return f"holds further keys, so it cannot be {shown}"
    if not message.startswith("Input should"):
        return message
    near = ""
    if item["type"] == "literal_error" and isinstance(item["input"], str):
        near = near_matches(item["input"], item["ctx"]["expected"].replace(" or ", ", ").replace("'", "").split(", "))
    return f"{message.removeprefix('Input ')}, not {shown}{near}"
