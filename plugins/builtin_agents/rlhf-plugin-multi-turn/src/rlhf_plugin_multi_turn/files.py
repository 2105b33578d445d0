"""Functions from a Python file."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhf_host import UserError


def functions_of(place: str, option: str) -> dict[str, Callable[..., Any]]:
    """The functions of ``FILE.py`` or ``FILE.py:NAME[,NAME]``, by name: those named, or all public ones that the file defines.

    Raises ``UserError`` for a file that is not there or cannot be imported, and for a name that it does not have.
    """
    path_text, _, names = place.partition(".py:") if ".py:" in place else (place.removesuffix(".py"), "", "")
    path = Path(path_text + ".py").expanduser().resolve()
    if not path.is_file():
        raise UserError(f"{option} {place}: there is no file {path}; give FILE.py or FILE.py:NAME,NAME")
    module_name = "rlhf_user_" + hashlib.sha256(str(path).encode()).hexdigest()[:12]
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look there
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"{option} {place}: importing it failed: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(path.parent))
    own = {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module_name and not name.startswith("_")
    }
    if not names:
        if not own:
            raise UserError(f"{option} {place}: the file defines no function")
        return own
    chosen = {}
    for name in names.split(","):
        value = getattr(module, name.strip(), None)
        if not callable(value):
            raise UserError(f"{option} {place}: it has no function {name.strip()!r}; it has {', '.join(own) or 'none'}")
        chosen[name.strip()] = value
    return chosen
