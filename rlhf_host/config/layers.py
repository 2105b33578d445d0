"""Layers of settings: presets, a file, flags, each laid on the one below.

A layer is a nested dict shaped like ``RunConfig``, with an ``At`` at every leaf; what it leaves out, it does not touch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rlhf_host.config.messages import Path
from rlhf_host.config.schema import DataConfig, PluginChoice, RunConfig
from rlhf_host.config.sections import MANY, NONE, REPLACED, SINGLE, spelled
from rlhf_host.config.yaml_file import At, plain
from rlhf_host.errors import near_matches

Layer = dict[str, Any]

DEFAULT = ""
"""The place of what nobody set."""


def defaults() -> Layer:
    """The plugins a run has unless told otherwise, and its one sure role."""
    config = RunConfig()
    layer: Layer = {"roles": {"actor": {}}}
    for key in SINGLE:
        if isinstance(choice := getattr(config, key), PluginChoice):
            layer[key] = {"plugin": At(choice.plugin, DEFAULT)}
    for key in MANY:
        layer[key] = {alias: {"plugin": At(choice.plugin, DEFAULT)} for alias, choice in getattr(config, key).items()}
    return layer


def lay(below: Layer, above: Layer, errors: list[str]) -> Layer:
    """``above`` on ``below``; neither is changed."""
    result = dict(below)
    for key, value in above.items():
        under = below.get(key)
        if key in SINGLE:
            result[key] = _lay_choice(under or {}, value)
        elif key in MANY:
            result[key] = _lay_choices(key, under or {}, value, errors)
        elif key == "roles":  # whose names may be those of sections
            result[key] = _lay_options(under or {}, value)
        elif key == "source_options":
            continue
        elif isinstance(value, dict):
            result[key] = lay(under if isinstance(under, dict) else {}, value, errors)
        else:
            result[key] = value
    if "source_options" in above:
        result["sources"] = _lay_source_options(result.get("sources"), above["source_options"], errors)
        result.pop("source_options", None)
    return result


def _lay_options(below: Any, above: Any) -> Any:
    if isinstance(below, dict) and isinstance(above, dict):
        return {**below, **{key: _lay_options(below.get(key), value) for key, value in above.items()}}
    return above


def _lay_choice(below: Layer, above: Layer) -> Layer:
    """Another plugin leaves the options of the one below behind."""
    if "plugin" in above and "plugin" in below and plain(above["plugin"]) != plain(below["plugin"]):
        return above
    return _lay_options(below, above)


def _lay_choices(section: str, below: Layer, above: Layer, errors: list[str]) -> Layer:
    chosen = {alias: choice for alias, choice in above.items() if "plugin" in choice}
    result = {} if chosen and section in REPLACED else dict(below)
    for alias, choice in chosen.items():
        if plain(choice["plugin"]) == NONE and section not in REPLACED:
            result.pop(alias, None)
        else:
            result[alias] = _lay_choice(below.get(alias, {}), choice)
    for alias, choice in above.items():
        if alias not in chosen:
            name = find_alias(alias, result)
            if name is None:
                place = next(_leaves(choice)).where
                have = f"chosen: {', '.join(result)}" if result else "none is chosen"
                errors.append(
                    f"{place}: no {spelled(section)} plugin goes by {alias!r} ({have}{near_matches(alias, result)}); "
                    f"choose it with --{spelled(section)} {alias}"
                )
            else:
                result[name] = _lay_choice(result[name], choice)
    return result


def find_alias(alias: str, known: Iterable[str]) -> str | None:
    """The known name that is ``alias`` up to kebab and snake case."""
    return next((name for name in known if name.replace("-", "_") == alias.replace("-", "_")), None)


def _lay_source_options(sources: At | None, settings: Mapping[str, Layer], errors: list[str]) -> At | None:
    entries = list(sources.value) if sources is not None else []
    for alias, values in settings.items():
        names = [_source_names(entry) for entry in entries]
        position = next((i for i, own in enumerate(names) if find_alias(alias, own)), None)
        if position is None:
            place = next(_leaves(values)).where
            known = [own[-1] for own in names] + [f for f in DataConfig.model_fields if f != "sources"]
            errors.append(f"{place}: {alias!r} is neither a data setting nor a source{near_matches(alias, known)}")
        else:
            entries[position] = _lay_options(entries[position], values)
    return At(entries, sources.where) if sources is not None else None


def _source_names(entry: Layer) -> list[str]:
    path = str(plain(entry.get("path", "")))
    last = path.rstrip("/").rsplit("/", 1)[-1]
    names = [path, last, last.split(".")[0]]
    return [*names, str(plain(entry["name"]))] if "name" in entry else names


def _leaves(layer: Any) -> Iterator[At]:
    if isinstance(layer, At):
        yield layer
    else:
        for value in layer.values():
            yield from _leaves(value)


def unwrap(layer: Any, path: Path = ()) -> tuple[Any, dict[Path, str]]:
    """Plain values, and for each path the place that set it."""
    origins: dict[Path, str] = {}
    if isinstance(layer, At):
        if layer.where != DEFAULT:
            origins[path] = layer.where
        if isinstance(layer.value, (dict, list)):
            value, inside = unwrap(layer.value, path)
            return value, inside | origins
        return layer.value, origins
    if isinstance(layer, dict):
        values = {}
        for key, item in layer.items():
            values[key], inside = unwrap(item, (*path, key))
            origins |= inside
        return values, origins
    if isinstance(layer, list):
        items = []
        for index, item in enumerate(layer):
            value, inside = unwrap(item, (*path, index))
            items.append(value)
            origins |= inside
        return type(layer)(items), origins
    return layer, origins
