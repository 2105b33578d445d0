"""The form people write: a file's tree, friendly or canonical, as a layer of settings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel

from rlhf_host.config.fieldtypes import section_model, takes_bool
from rlhf_host.config.layers import Layer
from rlhf_host.config.schema import DataConfig, DataSource, RoleConfig, RunConfig
from rlhf_host.config.sections import MANY, SHORTHANDS, SINGLE, SPELLINGS
from rlhf_host.config.yaml_file import At, plain
from rlhf_host.errors import PluginError, near_matches
from rlhf_host.plugins.selection import parse_choice


def from_tree(tree: At, errors: list[str]) -> Layer:
    """A file's tree, friendly or canonical, as a layer. Mistakes are appended to ``errors``."""
    return _section(RunConfig, tree, errors, top=True)


def _section(model: type[BaseModel], tree: At, errors: list[str], top: bool = False) -> Layer:
    layer: Layer = {}
    if not _is_mapping(tree, errors):
        return layer
    known = [*model.model_fields, *(SHORTHANDS if top else ()), *(SPELLINGS if top else ())]
    for key, value in tree.value.items():
        name = key.replace("-", "_")
        if top:
            name = SPELLINGS.get(name, name)
        if top and name in SHORTHANDS:
            _role(layer, SHORTHANDS[name], value, errors)
            continue
        if name not in model.model_fields:
            errors.append(f"{value.where}: no such key{near_matches(key, known)}")
            continue
        field = model.model_fields[name]
        inner = section_model(field.annotation)
        if value.value is None and (inner or name in MANY or name == "roles"):
            continue
        if top and name in SINGLE:
            layer[name] = _choice(value, errors, weight=False)
        elif name in MANY:
            layer[name] = _choices(name, value, errors)
        elif name == "roles":
            for role, settings in value.value.items() if _is_mapping(value, errors) else ():
                _role(layer, role, settings, errors)
        elif inner is DataConfig:
            layer[name] = _data(value, errors)
        elif inner is not None:
            layer[name] = _section(inner, value, errors)
        else:
            layer[name] = _leaf(field.annotation, value, errors)
    return layer


def _role(layer: Layer, name: str, settings: At, errors: list[str]) -> None:
    name, roles = name.replace("-", "_"), layer.setdefault("roles", {})
    roles[name] = {**roles.get(name, {}), **_section(RoleConfig, settings, errors)}


def _is_mapping(tree: At, errors: list[str]) -> bool:
    if isinstance(tree.value, dict):
        return True
    if tree.value is not None:
        errors.append(f"{tree.where}: holds further keys, so it cannot be {plain(tree)!r}")
    return False


def _leaf(annotation: Any, value: At, errors: list[str]) -> At:
    if isinstance(value.value, bool) and not takes_bool(annotation):
        errors.append(f"{value.where}: should not be {str(value.value).lower()}")  # pydantic would take true for 1
    return At(plain(value), value.where)


def _choice(tree: At, errors: list[str], weight: bool) -> Layer:
    """``rloo``, ``{name: rloo, clip_eps: 0.2}`` or ``{plugin: rloo, options: {clip_eps: 0.2}}``."""
    if isinstance(tree.value, str):
        return {"plugin": At(tree.value, tree.where)}
    if not isinstance(tree.value, dict):
        errors.append(f"{tree.where}: should be a plugin's name, or a mapping with 'name' and its options, not {plain(tree)!r}")
        return {}
    layer: Layer = {}
    options: dict[str, Any] = {}
    for key, value in tree.value.items():
        if key in ("plugin", "name"):
            if "plugin" in layer:
                errors.append(f"{value.where}: 'name' and 'plugin' mean the same: give one")
            elif not isinstance(value.value, str):
                errors.append(f"{value.where}: should be a plugin's name, not {plain(value)!r}")
            else:
                layer["plugin"] = value
        elif key == "weight" and weight:
            layer["weight"] = _leaf(float, value, errors)
        elif key == "options" and isinstance(value.value, dict):
            options |= {name.replace("-", "_"): _nested(item) for name, item in value.value.items()}
        elif key == "options" and value.value is None:
            continue
        else:
            options[key.replace("-", "_")] = _nested(value)
    if options:
        layer["options"] = options
    return layer


def _nested(tree: At) -> Any:
    """Mappings stay open to the layers above; everything else is one value."""
    if isinstance(tree.value, dict) and tree.value:
        return {key: _nested(value) for key, value in tree.value.items()}
    return At(plain(tree), tree.where)


def _choices(section: str, tree: At, errors: list[str]) -> Layer:
    """``a``, ``[a, alias=b, {name: c, ...}]`` or ``{alias: {name: b, ...}}``."""
    items: Iterable[tuple[str | None, At]]
    if isinstance(tree.value, dict):
        items = tree.value.items()
    elif isinstance(tree.value, list):
        items = [(None, item) for item in tree.value]
    else:
        items = [(None, tree)]
    layer: Layer = {}
    for alias, item in items:
        if alias is not None and item.value is None:
            item = At(alias, item.where)
        choice = _choice(item, errors, weight=section == "reward")
        if alias is None and "plugin" in choice and isinstance(choice["plugin"].value, str):
            alias, spec = choose(choice["plugin"].value, item.where, errors)
            choice["plugin"] = At(spec, item.where)
        elif alias is None:
            if isinstance(item.value, dict):
                errors.append(f"{item.where}: each entry needs the plugin's 'name'")
            continue
        if alias in layer:
            errors.append(f"{item.where}: {alias!r} is chosen twice; give one its own name: OTHER={plain(choice['plugin'])}")
            continue
        choice.setdefault("plugin", At(alias, item.where))
        layer[alias] = choice
    return layer


def choose(text: str, where: str, errors: list[str]) -> tuple[str, str]:
    """``alias=spec`` or ``spec`` → both."""
    try:
        return parse_choice(text)
    except PluginError as error:
        errors.append(f"{where}: {error}")
        return text, text


def _data(tree: At, errors: list[str]) -> Layer:
    """A path, a list of sources, or the section with its ``sources``."""
    if not isinstance(tree.value, dict):
        return {"sources": _sources(tree, errors)}
    sources = tree.value.get("sources")
    rest = {key: value for key, value in tree.value.items() if key != "sources"}
    layer = _section(DataConfig, At(rest, tree.where), errors)
    if sources is not None and sources.value is not None:
        layer["sources"] = _sources(sources, errors)
    return layer


def _sources(tree: At, errors: list[str]) -> At:
    """The list stays one value: a layer that names sources replaces those below."""
    entries = []
    for item in tree.value if isinstance(tree.value, list) else [tree]:
        if isinstance(item.value, str):
            entries.append(source(item.value, item.where))
        elif isinstance(item.value, dict):
            options = item.value.get("options")
            entry = _section(DataSource, At({k: v for k, v in item.value.items() if k != "options"}, item.where), errors)
            if options is not None and options.value is not None:
                entry["options"] = _nested(options)
            entries.append(entry)
        else:
            errors.append(f"{item.where}: should be a path, or a mapping with 'path', not {plain(item)!r}")
    return At(entries, tree.where)


def source(text: str, where: str) -> Layer:
    """``PATH[@WEIGHT]`` as a source."""
    path, weight = split_weight(text)
    return {"path": At(path, where)} | ({"weight": At(weight, where)} if weight is not None else {})


def split_weight(text: str) -> tuple[str, str | None]:
    """``PATH@WEIGHT`` → both; the part after ``@`` counts only when it is a number."""
    path, _, weight = text.rpartition("@")
    try:
        float(weight)
    except ValueError:
        return text, None
    return (path, weight) if path else (text, None)
