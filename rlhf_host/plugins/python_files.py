"""A user's functions and classes, imported from the Python file in which they lie; classes that are plugins, ``FILE.py:NAME``.

To such a class the file is what a distribution is to others, and the hash of its content is the version."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from rlhf_host.errors import PluginError, UserError, asks_to_stop, in_one_line, near_matches, near_siblings
from rlhf_host.plugins.discovery import PluginInfo


def is_in_file(spec: str) -> bool:
    """Returns True if a choice means a class in a file."""
    return ".py:" in spec


def describe_class(kind: str, spec: str) -> PluginInfo:
    """The class as discovery describes an installed plugin. Raises ``PluginError`` where the file is not there."""
    file, _, name = spec.rpartition(":")
    path = _existing(file, f"{kind} {name!r}")
    return PluginInfo(kind, name, str(path), digest(path)[:12], "any", "ok", "", f"{path}:{name}")


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def import_file(path: str | Path, option: str) -> ModuleType:
    """A Python file as a module of its own name (``rlhf_user_HASH``), imported once and again when its content has changed. What
    it imports from beside it is found, then and later.

    Args:
        option: what messages call the choice.

    Raises:
        PluginError: the file is not there, or cannot be imported.
    """
    path = _existing(path, option)
    name = "rlhf_user_" + hashlib.sha256(f"{path} {digest(path)}".encode()).hexdigest()[:12]
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look there
    folder = str(path.parent)
    known = folder in sys.path
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        sys.modules.pop(name, None)
        if asks_to_stop(error):
            raise
        way = "importing a file runs it: what a script does belongs under if __name__ == '__main__'"
        raise PluginError(f"{option}: importing {path} failed: {in_one_line(error)} ({way})") from error
    finally:
        sys.path.remove(folder)
        if not known:
            sys.path.append(folder)  # behind everything else, for what its functions import when they are called
    return module


def _existing(path: str | Path, option: str) -> Path:
    path = Path(path).expanduser().absolute()
    if not path.is_file() or path.suffix != ".py":
        raise PluginError(f"{option}: there is no Python file {path}{near_siblings(path, '*.py')}")
    return path


def functions_of(module: ModuleType) -> dict[str, Any]:
    """Returns the public functions that the file itself defines, by name."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and inspect.isfunction(value) and value.__module__ == module.__name__
    }


def member(module: ModuleType, name: str, option: str) -> Any:
    """Returns what the file has under a name. Raises ``UserError`` where it has nothing."""
    if not hasattr(module, name):
        near = near_matches(name, (each for each in vars(module) if not each.startswith("_")))
        raise UserError(f"{option}: {module.__file__} has no {name!r}{near}")
    return getattr(module, name)
