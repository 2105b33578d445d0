"""Trial of settings as a configuration, before they are written to a file."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from rlhf_host import PluginError, UserError
from rlhf_host.installed import find
from rlhf_host.settings import (
    MANY,
    SINGLE,
    Located,
    PluginChoice,
    RunConfig,
    Text,
    check,
    merge_needs,
    read_config,
    resolve,
)

_LIBRARY = re.compile(r"(\w+) '[^']*' needs \S+: pip install ")
"""Pattern of the message about a plugin whose library is missing."""


@dataclass
class Trial:
    """Result of a trial."""

    config: RunConfig | None = None
    """Whole configuration with the settings, if it is valid."""
    errors: list[tuple[str | None, str]] = field(default_factory=list)
    """Key of the wrong setting, if it is one, and the message."""

    @property
    def values(self) -> Mapping[str, Any]:
        return self.config.model_dump() if self.config is not None else {}


def load(settings: Mapping[str, Any], places: Mapping[str, str]) -> Trial:
    """Returns the configuration with these settings, or what is wrong with them.

    Args:
        places: key → its origin, for messages.

    Raises:
        UserError: a plugin that they need is not installed.
    """
    tree: dict[str, Any] = {}
    for path, value in settings.items():
        *sections, last = path.split(".")
        inner = tree
        for part in sections:
            inner = inner.setdefault(part, {})
        inner[last] = Located(_located(value), places[path])
    try:
        loaded = read_config(_sections(tree), quickstart=False)
        return Trial(resolve(loaded.config, loaded.origins).config)
    except UserError as error:
        errors: list[tuple[str | None, str]] = []
        for line in str(error).splitlines():
            path = next((path for path, place in places.items() if line.startswith(f"{place}: ")), "")
            message = line.removeprefix(f"{places[path]}: ") if path else line
            if path and path.endswith(".name") and _is_not_installed(path, str(settings.get(path)), message):
                raise
            errors.append((path or None, message))
        library = _LIBRARY.match(errors[0][1])
        rest = {path: value for path, value in settings.items() if not library or path.partition(".")[0] != library[1]}
        if len(rest) < len(settings):  # the others can be tried
            tried = load(rest, {path: places[path] for path in rest})
            return Trial(tried.config, [*errors, *tried.errors])
        return Trial(errors=errors)


def _is_not_installed(path: str, spec: str, message: str) -> bool:
    head = path.partition(".")[0]
    kind = SINGLE.get(head) or MANY.get(head)
    if kind is None:
        return False
    try:
        return find(kind, spec).status in ("disabled", "incompatible")
    except PluginError as error:
        return str(error) in message


def refusals(trial: Trial, asked: Collection[str]) -> list[str]:
    """Returns why ``--dry-run`` would refuse the settings, whatever the model and the data are.

    Args:
        asked: keys whose value the reader must set first.
    """
    if trial.config is None:
        return [message for _, message in trial.errors]
    known = [message for path, message in trial.errors if path is None]
    if trial.config.algo is None and "algo.name" in asked:
        return known
    config, left = _without_files(trial.config)
    try:
        run = resolve(config)
        with closing(run.plugins()) as manager:
            check(run, manager, merge_needs(manager))
    except UserError as error:
        chosen = () if "algo.name" not in asked else ("algo:",)  # a stand-in
        lines = [line for line in str(error).splitlines() if not (_is_asked(line, asked) or line.startswith(chosen))]
        return [*known, *(line for line in lines if not (left and line.startswith("no reward is chosen")))]
    return known


def _without_files(config: RunConfig) -> tuple[RunConfig, bool]:
    """Returns the configuration without rewards and agents from files, which a check would run, and True if there were some."""
    config = config.model_copy(deep=True)
    rewards = {alias: choice for alias, choice in config.reward.items() if not _is_file(choice)}
    left = len(rewards) < len(config.reward) or _is_file(config.agent)
    config.reward = rewards
    if _is_file(config.agent):
        config.agent = RunConfig().agent
    return config, left


def _is_file(choice: PluginChoice) -> bool:
    texts = (value for value in choice.model_dump().values() if isinstance(value, str))
    return any(text.endswith(".py") for text in texts)


def _is_asked(line: str, asked: Collection[str]) -> bool:
    """Returns True if the message is about a key that the file asks the reader for already."""
    flags = (f"--{key.removesuffix('.sources').removesuffix('.name').replace('_', '-')}" for key in asked)
    return any(flag in line.split() for flag in flags) or any(key in line for key in asked if "." in key)


def _located(value: Any) -> Any:
    if isinstance(value, list):
        return [Located(_located(item), "") for item in value]
    if isinstance(value, dict):
        return {key: Located(_located(item), "") for key, item in value.items()}
    return Text(value) if isinstance(value, str) else value


def _sections(tree: Any) -> Located:
    """Returns nested mappings, each at the place of the plugin's name, or of its first value."""
    if isinstance(tree, Located):
        return tree
    values = {key: _sections(value) for key, value in tree.items()}
    return Located(values, values.get("name", next(iter(values.values()), Located(None, ""))).where)
