"""Layers of settings, each a part of the canonical tree: presets, a file, flags, each merged into those below."""

from __future__ import annotations

from collections.abc import Iterable

from rlhf_host.config.problems import Path, Problems
from rlhf_host.config.schema import DataConfig, defaults
from rlhf_host.config.tree import DATA, NONE, SINGLE, Names, canonical, is_choice, is_empty, is_selection, snake_case
from rlhf_host.config.yaml_file import Located, plain
from rlhf_host.errors import near_matches
from rlhf_host.plugins.hints import of_flag

DEFAULT = ""
"""The place of what nobody set."""


def layer(tree: Located, names: Names, problems: Problems) -> Located:
    """The settings of a file, or of Python, as a layer."""
    whole = Located({}, tree.where)
    settings_of = snake_case(tree.value, problems)
    places = {key: names.place(key) for key in settings_of}
    # What is chosen by name comes before the shorthands, which add to it.
    for key, value in sorted(settings_of.items(), key=lambda item: places[item[0]][1] is not None):
        path, plugin = places[key]
        if plugin is not None and not isinstance(value.value, dict | None):
            problems.add(value.where, f"should be a mapping of the options of {plugin!r}, not {plain(value)!r}")
        elif plugin is not None or not is_empty(value, path):
            settings = canonical(value, path, problems)
            if plugin is not None:
                name = Located(plugin, value.where, implied=True)
                settings = Located({"name": name, **settings.value}, value.where)
            if settings.value != {}:
                whole = add(whole, nested(path, settings), problems)
    return whole


def nested(path: Path, value: Located) -> Located:
    """The value in the sections that lead to it."""
    for part in reversed(path):
        value = Located({part: value}, value.where)
    return value


def add(first: Located | None, second: Located, problems: Problems, path: Path = ()) -> Located:
    """Two parts of one layer as one. What both set, such as ``actor`` and ``roles.actor``, is a mistake; a plugin's name that
    nobody wrote gives way to one that was.
    """
    if first is None:
        return second
    if isinstance(first.value, dict) and isinstance(second.value, dict):
        values = dict(first.value)
        for key, value in second.value.items():
            values[key] = add(values.get(key), value, problems, (*path, key))
        return Located(values, first.where)
    if not first.implied and not second.implied:
        by = "is given twice" if first.where == second.where else f"is set already by {first.where}: leave one out"
        problems.add(second.where, by)
        return second
    name, implied = (first, second) if second.implied else (second, first)
    _refuse_other_plugin(path, name, implied, problems)
    return name


def _refuse_other_plugin(path: Path, name: Located, implied: Located, problems: Problems) -> None:
    """Adds a mistake where options of one plugin are set, and another one is chosen in its place."""
    if path[0] in SINGLE and plain(name).rpartition(":")[2] != implied.value:
        problems.add(
            implied.where,
            f"belongs to the {path[0]} {implied.value!r}, and {name.where} chooses {plain(name)!r}: leave one out",
        )


def merge(below: Located | None, above: Located, problems: Problems, path: Path = ()) -> Located:
    """``above`` over ``below``; neither is changed."""
    if not isinstance(above.value, dict):
        return above
    if below is None or not isinstance(below.value, dict):
        below = Located({}, DEFAULT)
    if is_selection(path):
        return _merge_selection(below, above, problems, path)
    old, new = (tree.value.get("name") if is_choice(path) else None for tree in (below, above))
    if old and new and plain(old) != plain(new):
        if not new.implied or old.where == DEFAULT:
            return above  # the options below are another plugin's
        _refuse_other_plugin(path, old, new, problems)
    values, of_sources = dict(below.value), {}
    for key, value in above.value.items():
        if path in DATA and key not in DataConfig.model_fields:
            of_sources[key] = value
        else:
            values[key] = merge(values.get(key), value, problems, (*path, key))
    for name, settings in of_sources.items():
        values["sources"] = _set_in_source(values.get("sources"), name, settings, problems)
    if old and new and new.implied:
        values["name"] = old
    return Located(values, above.where)


def _merge_selection(below: Located, above: Located, problems: Problems, path: Path) -> Located:
    """Chosen rewards replace those below; extensions and trackers are added to them."""
    replaces = path[-1] == "reward"
    chosen = {alias: choice for alias, choice in above.value.items() if "name" in choice.value}
    values = {} if chosen and replaces else dict(below.value)
    for alias, choice in chosen.items():
        if plain(choice.value["name"]) == NONE and not replaces:
            if values.pop(alias, None) is None and alias not in defaults().get(str(path[0]), ()):
                problems.add(choice.where, f"there is no {alias!r} to take away{near_matches(alias, values)}")
        else:
            values[alias] = merge(below.value.get(alias), choice, problems, (*path, alias))
    for alias, choice in above.value.items():
        if alias in chosen:
            continue
        if (known := find_alias(alias, values)) is not None:
            values[known] = merge(values[known], choice, problems, (*path, known))
            continue
        flag = ".".join(map(str, path))
        near = (f"chosen: {', '.join(values)}" if values else "none is chosen") + near_matches(alias, values)
        problems.add(choice.where, f"no {flag} plugin is called {alias!r} ({near}); choose it with --{flag} {alias}")
    return Located(values, above.where)


def find_alias(alias: str, known: Iterable[str]) -> str | None:
    """The known name that is ``alias`` up to kebab and snake case."""
    return next((name for name in known if name.replace("-", "_") == alias.replace("-", "_")), None)


def _set_in_source(sources: Located | None, name: str, settings: Located, problems: Problems) -> Located:
    """``settings`` merged into the source called ``name``."""
    entries = list(sources.value) if sources else []
    names = [_source_names(entry) for entry in entries]
    number = next((i for i, own in enumerate(names) if find_alias(name, own)), None)
    if number is None:
        known = [own[-1] for own in names] + [key for key in DataConfig.model_fields if key != "sources"]
        near = of_flag(f"data.{name}") or near_matches(name, known)
        problems.add(settings.where, f"{name!r} is neither a data setting nor a source{near}")
    else:
        entries[number] = merge(entries[number], settings, problems, ("data", "sources", number))
    return Located(entries, sources.where if sources else settings.where)


def _source_names(source: Located) -> list[str]:
    values = plain(source)
    path = str(values.get("path", ""))
    last = path.rstrip("/").rsplit("/", 1)[-1]
    return [path, last, last.split(".")[0], *([str(values["name"])] if values.get("name") else [])]
