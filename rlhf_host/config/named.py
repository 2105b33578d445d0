"""The files that ``--config`` names: a file, or a preset, recipe or environment by its name."""

from __future__ import annotations

from pathlib import Path

from rlhf_host.config.environments import environment_layer
from rlhf_host.config.recipes import recipe_settings, recipes
from rlhf_host.config.yaml_file import Located, read_yaml
from rlhf_host.errors import PluginError, UserError, a, near_matches
from rlhf_host.plugins.catalogue import offered
from rlhf_host.plugins.discovery import PluginInfo, discover, preset_file
from rlhf_host.plugins.selection import find

SORTS = {"environment": "preset", "preset": "preset", "recipe": "recipe"}
"""Word before a colon → the kind of what is named. An environment in a package is a preset."""

ENDINGS = (".yaml", ".yml", ".py")


def settings_of(text: str) -> Located:
    """The settings that ``NAME``, ``preset:NAME``, ``recipe:NAME`` or a file stands for.

    Raises:
        UserError: nothing is called so, or several are.
    """
    kind, name = meant(text)
    if ":" in text and kind != "file" and (other := _other_sort(kind, name)):
        raise UserError(f"--config {text}: {other}")
    if kind == "recipe":
        return recipe_settings(name)
    if kind == "file":
        return environment_layer(Path(name).expanduser().absolute(), name) if name.endswith(".py") else read_yaml(name)
    try:
        info = find("preset", name)
    except PluginError as error:
        # Endings of files are spellings of other plugins, of which the message would speak.
        nobody = f"no preset named {name!r} is installed" if name.endswith(ENDINGS) else str(error)
        sort = "preset or environment" if text.startswith("environment:") else "preset"
        raise UserError(f"--config {text}: {nobody.replace('no preset named', f'no {sort} named')}") from error
    if (file := preset_file(info)) is None:
        raise UserError(f"--config {text}: {info.problem}")
    return environment_layer(file, f"preset {name}") if file.suffix == ".py" else read_yaml(file, f"preset {name}")


def meant(text: str) -> tuple[str, str]:
    """``file``, ``preset`` or ``recipe``, and the name. An environment that a package names is found as a preset.

    Raises:
        UserError: nothing is called so, or several are.
    """
    kind, colon, name = text.partition(":")
    if colon and kind in SORTS:
        return SORTS[kind], name
    if "/" in text or text.endswith(ENDINGS):
        return "file", text
    found = [*_kinds(text), *(["file"] if Path(text).is_file() else [])]
    if len(found) > 1:
        ways = " or ".join(f"--config ./{text}" if kind == "file" else f"--config {kind}:{text}" for kind in found)
        raise UserError(f"--config {text}: a {' and a '.join(found)} are called so: write {ways}")
    if not found and text not in offered().get("preset", {}):
        near = near_matches(text, [*(info.name for info in _presets()), *recipes()])
        known = near or f"; recipes are {', '.join(recipes())}, and rlhf plugins --kind preset lists presets"
        raise UserError(f"--config {text}: no file, preset, recipe or environment is called so{known}")
    return (found or ["preset"])[0], text


def _presets() -> list[PluginInfo]:
    return [info for info in discover(disabled=True) if info.kind == "preset"]


def _kinds(name: str) -> list[str]:
    """Returns which of preset and recipe are called so."""
    preset, recipe = any(info.goes_by(name) for info in _presets()), name in recipes()
    return ["preset"] * preset + ["recipe"] * recipe


def _other_sort(kind: str, name: str) -> str:
    """Returns what a name is that is not of this kind, and what to write; empty where it is, or nothing is called so."""
    kinds = _kinds(name)
    if kinds:
        return "" if kind in kinds else f"{name!r} is {a(kinds[0])}: --config {kinds[0]}:{name}"
    files = (
        file for file in (name, *(f"{name}{ending}" for ending in ENDINGS)) if file.endswith(ENDINGS) and Path(file).is_file()
    )
    file = next(files, None)
    return f"{file} is a file: --config {file}" if file is not None else ""
