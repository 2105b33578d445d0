"""Functions from a Python file."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from rlhf_host import UserError, import_file


def functions_of(place: str, option: str) -> dict[str, Callable[..., Any]]:
    """Returns the functions of ``FILE.py`` or ``FILE.py:NAME[,NAME]``, by name: those named, or all public ones that the file
    defines.

    Raises ``UserError`` for a file that does not exist or cannot be imported, and for a name that it does not have.
    """
    path, colon, names = place.partition(".py:")
    module = import_file(path + ".py" if colon else path, option)
    own = {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
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
