"""Writes what ``rlhf env export`` gives: a package for verifiers, or a folder for NeMo Gym, with the settings and data it needs."""

from __future__ import annotations

import ast
import json
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import click

from rlhf_environments.opening import Opened
from rlhf_host import UserError, __version__
from rlhf_host.commands import new_directory
from rlhf_host.settings import RunConfig, write_yaml

SECTIONS = ("agent", "agents", "data", "reward", "rollout", "seed")
"""Settings that an environment is made of."""
_CACHES = shutil.ignore_patterns("__pycache__")
_FILE = re.compile(r"(?P<file>.+?\.\w+)(?P<rest>:[\w,.]+)?")


def write(
    form: str, opened: Opened, config: RunConfig, folder: Path, name: str, *, force: bool, limits: Mapping[str, Any]
) -> None:
    """Writes the folder. Raises ``UserError`` for a name that no module can have."""
    module = re.sub(r"\W", "_", name.lower())
    if not module.isidentifier():
        raise UserError(f"--name {name}: a module cannot be called {module!r}: give another name")
    folder = folder.expanduser().resolve()
    refuse_existing(folder, force)
    first = opened.session.run(_first(opened))
    with new_directory(folder) as made:
        write_form = _verifiers if form == "verifiers" else _gym
        inner = write_form(made, name, module, first, opened)
        copied = _settings(config, inner)
        own = {"python": sys.executable, "rlhf_host": __version__}
        _text(inner / "exported.json", json.dumps(own, indent=2) + "\n")
        _text(inner / "limits.json", json.dumps(dict(limits)) + "\n")
        shutil.copyfile(str(files("rlhf_environments") / "player_client.py"), inner / "player_client.py")
    for place in copied:
        click.echo(f"copied {place}", err=True)


def refuse_existing(folder: Path, force: bool) -> None:
    """Raises ``UserError`` for a place where something is that must not be replaced."""
    if not (folder.exists() or folder.is_symlink()):
        return
    if not force:
        raise UserError(f"--output {folder}: it exists already: choose another folder, or add --force to replace it")
    if not [*folder.glob("*/exported.json"), *folder.glob("resources_servers/*/exported.json")]:
        raise UserError(f"--output {folder}: it was not written by rlhf env export, so --force does not replace it")


async def _first(opened: Opened) -> Any:
    """Returns what the first task's episode shows first."""
    play, question = await opened.environment.start(0)
    await play.close()
    return question


def _verifiers(folder: Path, name: str, module: str, first: Any, opened: Opened) -> Path:
    inner = folder / module
    inner.mkdir()
    names = {"name": name, "module": module, "has_tools": bool(first.tools)}
    _text(inner / "__init__.py", _template("verifiers.txt", **names))
    _text(inner / "tools.py", _template("verifiers_tools.txt", **names))
    _text(folder / "pyproject.toml", _template("verifiers_pyproject.txt", distribution=module.replace("_", "-"), **names))
    _text(folder / "README.md", _template("verifiers_readme.txt", tasks=len(opened.environment.tasks), **names))
    return inner


def _gym(folder: Path, name: str, module: str, first: Any, opened: Opened) -> Path:
    inner, agent = folder / "resources_servers" / module, folder / "responses_api_agents" / f"{module}_agent"
    for made in (inner / "configs", inner / "data", agent):
        made.mkdir(parents=True)
    names = {"name": name, "module": module, "tasks": len(opened.environment.tasks)}
    _text(inner / "app.py", _template("gym_app.txt", **names))
    _text(agent / "app.py", _template("gym_agent.txt", **names))
    for place in (inner, agent):
        _text(place / "requirements.txt", "nemo-gym>=0.4,<0.5\n")
    _text(inner / "configs" / f"{module}.yaml", _template("gym_config.txt", **names))
    _text(folder / "README.md", _template("gym_readme.txt", **names))
    lines = opened.session.run(_rows(opened))
    _text(inner / "data" / "rows.jsonl", "".join(f"{line}\n" for line in lines))
    shutil.copyfile(str(files("rlhf_environments") / "responses.py"), inner / "responses.py")
    return inner


async def _rows(opened: Opened) -> list[str]:
    from rlhf_environments.gym import rows

    return [json.dumps(row, ensure_ascii=False) async for row in rows(opened.environment)]


def _template(file: str, **names: Any) -> str:
    """Returns a template's text, in which ``@name@`` stands for a value."""
    text = (files("rlhf_environments") / "templates" / file).read_text(encoding="utf-8")
    return re.sub(r"@(\w+)@", lambda found: str(names[found[1]]), text)


def _settings(config: RunConfig, folder: Path) -> list[str]:
    """Writes the settings, and copies the files that they name. Returns those."""
    given = config.model_dump(mode="json", by_alias=True, exclude_unset=True)
    kept = {key: given[key] for key in SECTIONS if key in given}
    copied: dict[str, str] = {}
    (folder / "environment.yaml").write_bytes(write_yaml(_moved(kept, folder, copied)).encode())
    return [*copied]


def _moved(value: Any, folder: Path, copied: dict[str, str]) -> Any:
    """Returns settings in which files are those of the folder."""
    if isinstance(value, Mapping):
        return {key: _moved(item, folder, copied) for key, item in value.items()}
    if isinstance(value, list):
        return [_moved(item, folder, copied) for item in value]
    for path, rest in _paths(value):
        if path.exists():
            place = str(path.resolve())
            if place not in copied:
                copied[place] = f"files/{len(copied)}/{path.name}"
                target = folder / copied[place]
                target.parent.mkdir(parents=True)
                shutil.copytree(path, target) if path.is_dir() else shutil.copyfile(path, target)
                for module in _modules_beside(path):
                    beside = target.parent / module.name
                    shutil.copytree(module, beside, ignore=_CACHES) if module.is_dir() else shutil.copyfile(module, beside)
                    copied[str(module.resolve())] = f"{target.parent.relative_to(folder)}/{module.name}"
            return copied[place] + rest
    return value


def _modules_beside(path: Path) -> list[Path]:
    """Returns modules and packages beside a Python file that it imports, and those that these import."""
    found: list[Path] = []
    path = path.absolute()  # and not where a link leads: imports look beside the link
    wanted, folder = [path], path.parent
    while wanted:
        file = wanted.pop()
        for name in _imported(file) if file.suffix == ".py" else ():
            for module in (folder / name, folder / f"{name}.py"):
                if module not in (path, *found) and (module.is_file() if module.suffix else any(module.rglob("*.py"))):
                    found.append(module)
                    wanted += [module] if module.is_file() else [*module.rglob("*.py")]
                    break
    return found


def _imported(file: Path) -> list[str]:
    """Returns the first parts of the names that a file imports, wherever it does. Those of a broken file are not known."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return []
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.append(node.module or "")
    return [*dict.fromkeys(name.partition(".")[0] for name in names if name.partition(".")[0] != "rlhf_host")]


def _paths(value: Any) -> Iterator[tuple[Path, str]]:
    """Yields the file that a setting may name, and what follows its name: ``tools.py:add``."""
    if not isinstance(value, str) or not value or "\n" in value:
        return
    if "/" in value or "." in value:
        yield Path(value).expanduser(), ""
    if found := _FILE.fullmatch(value):
        yield Path(found["file"]).expanduser(), found["rest"] or ""


def _text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
