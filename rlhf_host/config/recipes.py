"""Recipes: configurations that run as they stand, chosen by name. They are in ``examples`` of a clone, and in the package."""

from __future__ import annotations

import re
from pathlib import Path

from rlhf_host.config.schema import RunConfig
from rlhf_host.config.tree import role_flag
from rlhf_host.config.yaml_file import Located, read_yaml
from rlhf_host.directories import packaged
from rlhf_host.errors import UserError, near_matches

EXAMPLES = "examples/"
"""Beginning of paths of files beside the recipes."""
BEFORE = ("runs/recipes/", "models/")
"""Beginning of paths of models that another recipe or ``make smollm2`` leaves."""


def recipes() -> dict[str, Path]:
    """Name → file."""
    return {file.stem: file for file in sorted((_examples() / "recipes").glob("*.yaml"))}


def recipe_file(name: str) -> Path:
    """Raises ``UserError`` for an unknown name."""
    known = recipes()
    if name not in known:
        raise UserError(f"--config recipe:{name}: no such recipe{near_matches(name, known)}; there are {', '.join(known)}")
    return known[name]


def recipe_settings(name: str) -> Located:
    """Its settings, with the paths of files beside the recipes made absolute: a recipe runs in any directory."""
    return _found(read_yaml(recipe_file(name)))


def require_models(name: str, config: RunConfig) -> None:
    """Raises ``UserError`` where a model is not there that the recipe, if that is one, says how to get."""
    recipe = name.removeprefix("recipe:")
    for role, settings in config.roles.items() if recipe in recipes() else ():
        model = settings.model
        if model and model.startswith(BEFORE) and not Path(model).exists():
            (needs,) = about(recipe_file(recipe))["needs"]
            other = f"or give another model: --{role_flag(role)}.model DIR"
            raise UserError(f"--config {name}: there is no {model}; before it: {needs}; {other}")


def about(file: Path) -> dict[str, list[str]]:
    """The lines ``# KEY: TEXT`` at the head of a recipe, of which further lines may be indented; ``about`` is the first line."""
    first, *rest = file.read_text(encoding="utf-8").splitlines()
    found: dict[str, list[str]] = {"about": [first.removeprefix("# ")]}
    texts: list[str] = []
    for line in rest:
        if not line.startswith("#"):
            break
        if match := re.fullmatch(r"# ([\w. ]+?): +(.*)", line):
            texts = found.setdefault(match[1], [])
            texts.append(match[2])
        elif texts and line.startswith("#   "):
            texts[-1] += f" {line[1:].strip()}"
    return found


def _examples() -> Path:
    return packaged("_examples", "examples")


def _found(tree: Located) -> Located:
    value = tree.value
    if isinstance(value, dict):
        return Located({key: _found(item) for key, item in value.items()}, tree.where)
    if isinstance(value, list):
        return Located([_found(item) for item in value], tree.where)
    if isinstance(value, str) and value.startswith(EXAMPLES):
        return Located(str(_examples() / value.removeprefix(EXAMPLES)), tree.where)
    return tree
