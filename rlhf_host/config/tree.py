"""The one tree behind files, flags and Python: its keys, and what people may write instead of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import chain
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from rlhf_host.config.problems import Path, Problems
from rlhf_host.config.schema import DataConfig, DataSource, LoraOptions, RunConfig
from rlhf_host.config.yaml_file import Located, located, plain
from rlhf_host.plugins.catalogue import offered
from rlhf_host.plugins.discovery import discover
from rlhf_host.plugins.options import members, nested_model
from rlhf_host.plugins.python_files import is_in_file
from rlhf_host.plugins.selection import parse_choice
from rlhf_host.plugins.spellings import written_out

SINGLE = {
    "algo": "algo",
    "agent": "agent",
    "engine": "engine",
    "backend": "backend",
    "runtime": "runtime",
    "sync": "weight_sync",
    "kernels": "kernels",
}
"""Key → plugin kind, one plugin each."""

MANY = {"agents": "agent", "reward": "reward", "with": "extension", "tracker": "tracker"}
"""Key → plugin kind, an alias → plugin mapping each; ``eval.reward`` is another."""

SHORTHANDS = {
    "actor": "actor",
    "critic": "critic",
    "reference": "reference",
    "reward_model": "reward",  # --reward chooses what judges
    "teacher": "teacher",
}
"""Shorthand → role: ``--critic.lr`` for ``--roles.critic.lr``, ``--reward-model.dtype`` for ``--roles.reward.dtype``."""

ROLES = tuple(SHORTHANDS.values())
"""Roles with a shorthand; where a role starts from another, these names mean a role and no path."""

SHORT = {
    "model": "actor.model",
    "lr": "actor.lr",
    "steps": "train.steps",
    "batch-size": "train.batch-size",
    "n": "rollout.n",
    "max-new-tokens": "rollout.max-new-tokens",
}
"""Short names that flags and arguments have for the settings that everybody sets."""

NAMED = {"extension": "with", "tracker": "tracker", "runtime": "runtime"}
"""Kinds of plugins whose names are flags and keys of their own → the key that chooses one."""

DATA: tuple[Path, ...] = (("data",), ("eval", "data"))
"""Places of data sources."""

TASKS = "tasks"
"""The kind of plugin that a data source may be, and what one is called that has no name."""

NONE = "none"
"""``ALIAS=none`` takes an extension or tracker of a lower layer away."""


def role_flag(role: str) -> str:
    """The role's section as flags spell it, without dashes: ``critic``, ``reward-model``, ``roles.helper``."""
    return next((name.replace("_", "-") for name, known in SHORTHANDS.items() if known == role), f"roles.{role}")


class Names:
    """Meanings of top-level keys: a setting, a role, or the name of an extension, a tracker or a runtime. Imports none of these."""

    @cached_property
    def plugins(self) -> Mapping[str, str]:
        """Extensions, trackers and runtimes by name → their kind. With those of the lists that come with the host, so that choosing
        one says what to install."""
        listed = {name: kind for kind in NAMED for name in offered().get(kind, ())}
        return listed | {info.name: info.kind for info in discover(disabled=True) if info.kind in NAMED}

    def place(self, key: str) -> tuple[Path, str | None]:
        """Returns where the key's settings belong, and the plugin that they choose."""
        if key in fields_of(RunConfig):
            return (key,), None
        if key in SHORTHANDS:
            return ("roles", SHORTHANDS[key]), None
        name = next((name for name in self.plugins if name.replace("-", "_") == key), None)
        if name is None:
            return (key,), None
        key = NAMED[self.plugins[name]]
        return (key, name) if key in MANY else (key,), name

    @staticmethod
    def option_flag(plugin: str, option: str) -> str | None:
        """Returns how an option is set of an installed plugin whose name is no key: ``--algo.clip-eps`` for ``--grpo.clip-eps``."""
        names = {info.kind: info.name for info in discover() if info.name.replace("_", "-") == plugin}
        single = (f"--{key}.{option}" for key, kind in SINGLE.items() if kind in names)
        many = (f"--{key}.{names[kind]}.{option}" for key, kind in MANY.items() if kind in names)
        return next(chain(single, many), None)


# --- the schema by path -------------------------------------------------------------------------


def fields_of(model: type[BaseModel]) -> dict[str, Any]:
    """Key → field."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def holds_sections(annotation: Any) -> bool:
    return any(nested_model(inner) for member in members(annotation) for inner in (member, *get_args(member)))


def annotation_at(path: Path) -> Any:
    """Returns what the schema allows there: ``Any`` for a plugin's own options, ``None`` for what does not exist. Beside the
    keys of ``data`` are names of its sources."""
    annotation: Any = RunConfig
    for part in path:
        if annotation in (Any, None):
            break
        model = nested_model(annotation)
        if model is not None:
            field = fields_of(model).get(str(part))
            unknown = DataSource if model is DataConfig else Any if model.model_config.get("extra") == "allow" else None
            annotation = field.annotation if field else unknown
        else:
            inner = (get_args(member) for member in members(annotation) if get_origin(member) in (dict, list))
            annotation = next(inner, (None,))[-1]
    return annotation


def lora_path(path: Path) -> Path:
    """``--actor.lora-rank``, as other projects write it, is ``--actor.lora.rank``."""
    head, _, option = str(path[-1]).partition("_")
    short = len(path) == 3 and path[0] == "roles" and head == "lora" and option in LoraOptions.model_fields
    return (*path[:-1], head, option) if short else path


def is_choice(path: Path) -> bool:
    """Returns True if one plugin is chosen there."""
    return (len(path) == 1 and path[0] in SINGLE) or is_selection(path[:-1])


def is_selection(path: Path) -> bool:
    """Returns True if several plugins are chosen there, each under an alias."""
    return path == ("eval", "reward") or (len(path) == 1 and path[0] in MANY)


# --- what people write --------------------------------------------------------------------------


def canonical(tree: Located, path: Path, problems: Problems) -> Located:
    """Returns what was written at ``path``, as ``config.yaml`` has it.

    A plugin may be its name alone; several may be a list, or a mapping whose aliases are names; data may be a path or a list;
    keys may have dashes. What a key at the top means is for ``Names``.
    """
    value = tree.value
    if is_choice(path):
        return Located(_written_out(_kind(path), _choice(tree, problems), problems), tree.where)
    if is_selection(path):
        return Located(dict(_choices(tree, path, problems)), tree.where)
    if path in DATA and value is not None and not isinstance(value, dict):
        return Located({"sources": canonical(tree, (*path, "sources"), problems)}, tree.where)
    if path[:-1] in DATA and path[-1] == "sources":
        items = value if isinstance(value, list) else [tree]
        return Located([_source(item, problems) for item in items], tree.where)
    if isinstance(value, dict) and annotation_at(path) is not None:
        inner = {key: canonical(item, (*path, key), problems) for key, item in snake_case(value, problems).items()}
        return Located({key: item for key, item in inner.items() if not is_empty(item, (*path, key))}, tree.where)
    return tree


def snake_case(values: Mapping[str, Located], problems: Problems) -> dict[str, Located]:
    result: dict[str, Located] = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name in result:
            problems.add(value.where, f"{name!r} is already set, with dashes or underscores")
        result[name] = value
    return result


def is_empty(tree: Located, path: Path) -> bool:
    """Returns True if a section is named, and nothing in it."""
    return tree.value is None and holds_sections(annotation_at(path))


def _choice(tree: Located, problems: Problems) -> dict[str, Located]:
    if isinstance(tree.value, str):
        return {"name": tree}
    if not isinstance(tree.value, dict | None):
        shown = plain(tree)
        problems.add(tree.where, f"should be a plugin's name, or a mapping with 'name' and its options, not {shown!r}")
    return snake_case(tree.value, problems) if isinstance(tree.value, dict) else {}


def _kind(path: Path) -> str:
    """Returns the kind of the plugins that are chosen there."""
    key = str(path[-1] if is_selection(path) else path[0] if path[0] in SINGLE else path[-2])
    return SINGLE.get(key) or MANY[key]


def _written_out(kind: str, choice: dict[str, Located], problems: Problems) -> dict[str, Located]:
    """A choice whose name implies options, with these."""
    tree = choice.get("name")
    if tree is None or not isinstance(tree.value, str):
        return choice
    with problems.at(tree.where):
        name, options = written_out(kind, tree.value)
        implied = {key: located(value, tree.where) for key, value in options.items()}
        return {**implied, **choice, "name": Located(name, tree.where)} if name != tree.value else choice
    return choice


def _choices(tree: Located, path: Path, problems: Problems) -> Iterator[tuple[str, Located]]:
    entries = tree.value if isinstance(tree.value, list) else [] if tree.value is None else [tree]
    by_alias = isinstance(tree.value, dict) and not isinstance(plain(tree).get("name"), str)  # else one plugin is spelled out
    items = tree.value.items() if by_alias else [("", entry) for entry in entries]
    aliases: set[str] = set()
    for alias, item in items:
        choice = _choice(item, problems)
        name = choice.get("name")
        if not alias:
            if name is None or not isinstance(name.value, str):
                if isinstance(item.value, dict):
                    problems.add(item.where, "each entry needs the plugin's 'name'")
                continue
            with problems.at(name.where):
                alias, spec = parse_choice(name.value)
                choice["name"] = Located(spec, name.where)
            if not alias:
                continue
        if alias in aliases:
            spec = plain(choice["name"])
            problems.add(item.where, f"{alias!r} is chosen twice; give one its own name: OTHER={spec}")
            continue
        aliases.add(alias)
        whole = _written_out(_kind(path), choice, problems)
        yield alias, Located({"name": Located(alias, item.where, implied=True), **whole}, item.where)


def _source(item: Located, problems: Problems) -> Located:
    """``PATH[@WEIGHT]``, where the part after ``@`` counts only when it is a number, or a mapping."""
    if isinstance(item.value, dict):
        return Located(snake_case(item.value, problems), item.where)
    if not isinstance(item.value, str):
        problems.add(item.where, f"should be a path, or a mapping with 'path', not {plain(item)!r}")
    path, _, weight = str(item.value).rpartition("@")
    try:
        float(weight)
    except ValueError:
        path, weight = str(item.value), ""
    source = {"path": path, "weight": weight} if weight else {"path": path}
    name, options = path, dict[str, Any]()
    with problems.at(item.where):
        name, options = written_out(TASKS, path)
    if name != path:
        named = list(options.values())[1:] or [name.rpartition(":")[2]] * is_in_file(name)  # behind the file
        source |= {"path": name, "name": named[0] if named else TASKS, **options}
    return located(source, item.where)
