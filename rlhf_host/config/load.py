"""From presets, a YAML file and flags to one ``RunConfig``."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rlhf_host.config.flags import Flag, from_flags, parse
from rlhf_host.config.friendly import from_tree
from rlhf_host.config.layers import Layer, defaults, lay, unwrap
from rlhf_host.config.messages import Origins, fail, validation_lines, where
from rlhf_host.config.schema import RunConfig
from rlhf_host.config.sections import SINGLE
from rlhf_host.config.yaml_file import At, read_yaml
from rlhf_host.errors import PluginError, UserError
from rlhf_host.plugins.discovery import preset_file
from rlhf_host.plugins.selection import find

QUICKSTART = "quickstart"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration, where each of its values was set, and what the person should be told."""

    config: RunConfig
    origins: Origins
    notices: tuple[str, ...] = ()


def load_config(path: str | Path | None = None, flags: Sequence[str] = (), presets: Sequence[str] = ()) -> RunConfig:
    """The configuration of a file with flags on top and presets beneath; plugins' own options stay as given.

    Raises:
        UserError: one line per mistake, each with file and line, or flag.
    """
    return read_config(path, parse(flags), presets).config


def read_config(
    path: str | Path | None = None,
    flags: Sequence[Flag] = (),
    presets: Sequence[str] = (),
    control: Collection[str] = (),
    *,
    settings: At | None = None,
    quickstart: bool = True,
) -> Loaded:
    """As ``load_config``, keeping the places.

    With neither a model nor data, the preset ``quickstart`` goes under everything, and a notice says so.

    Args:
        control: the command's own flags, for near matches.
        settings: from Python, in the form of a file; they lie on top.
        quickstart: whether a run without model and data gets the preset.
    """
    errors: list[str] = []
    layer, notices = assemble(path, flags, presets, errors, control, settings, quickstart)
    values, origins = unwrap(layer)
    notices += _widen(values)
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        fail([*errors, *validation_lines(error, origins)])
        raise
    fail(errors)
    return Loaded(config, origins, notices)


def assemble(
    path: str | Path | None,
    flags: Sequence[Flag],
    presets: Sequence[str],
    errors: list[str],
    control: Collection[str] = (),
    settings: At | None = None,
    quickstart: bool = True,
) -> tuple[Layer, tuple[str, ...]]:
    """All layers as one, and notices. Mistakes are appended to ``errors``."""
    layers = [defaults()]
    for preset in presets:
        layers.append(_preset(preset, errors))
    if path is not None:
        layers.append(from_tree(read_yaml(path), errors))
    layers.append(from_flags(flags, errors, control))
    if settings is not None:
        layers.append(from_tree(settings, errors))
    notices: tuple[str, ...] = ()
    if quickstart and not any(_has(layer, "roles", "actor", "model") or _has(layer, "data", "sources") for layer in layers):
        layers.insert(1, _preset(QUICKSTART, errors))
        notices = (f"Neither --actor.model nor --data is given: using the preset {QUICKSTART!r}, a tiny model on arithmetic.",)
    result: Layer = {}
    for layer in layers:
        result = lay(result, layer, errors)
    _refuse_nameless(result, errors)
    return result, notices


def _widen(values: dict[str, Any]) -> tuple[str, ...]:
    """vLLM gets the quickstart model whose heads are wide enough for it; notices of that."""
    match values:
        case {"engine": {"plugin": "vllm"}, "roles": {"actor": {"model": "quickstart"} as actor}}:
            actor["model"] = "quickstart-wide"
            return ("Engine vllm: taking the model 'quickstart-wide', whose attention heads vLLM can serve on a CPU.",)
    return ()


def _preset(name: str, errors: list[str]) -> Layer:
    """A preset by its entry point's name, or a YAML file."""
    if name.endswith((".yaml", ".yml")):
        return from_tree(read_yaml(name), errors)
    try:
        info = find("preset", name)
    except PluginError as error:
        raise UserError(f"--preset {name}: {error}") from error
    file = preset_file(info)
    if file is None:
        raise UserError(f"--preset {name}: {info.problem}")
    return from_tree(read_yaml(file, f"preset {name}"), errors)


def _has(layer: Layer, *path: str) -> bool:
    for key in path:
        if not isinstance(layer, dict) or key not in layer:
            return False
        layer = layer[key]
    return layer.value not in (None, [])  # type: ignore[attr-defined]


def _refuse_nameless(layer: Layer, errors: list[str]) -> None:
    for key in SINGLE:
        if key in layer and "plugin" not in layer[key]:
            _, origins = unwrap(layer.pop(key), (key,))
            if origins:
                errors.append(f"{where((key,), origins)}: no {key} is chosen; add --{key} NAME")
