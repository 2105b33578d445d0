"""Commands for messages, in a form that works when pasted into the user's shell."""

from __future__ import annotations

import os
import shlex
import shutil
import sysconfig
from pathlib import Path


def rlhf(*arguments: object, cwd: Path | None = None) -> str:
    """Returns ``rlhf`` with these arguments, quoted. Its path is included if the shell would not find it, as in an environment
    that is not activated.

    Args:
        cwd: where the command is to be run; default: here.
    """
    return shlex.join([*_program("rlhf", cwd), *map(str, arguments)])


def tool(name: str, *arguments: object, cwd: Path | None = None) -> str:
    """Returns the same for a module of this environment that has a command, such as ``pip``."""
    found = _program("rlhf", cwd) == ["rlhf"]
    return shlex.join([*([name] if found else [*_program("python", cwd), "-m", name]), *map(str, arguments)])


def _program(name: str, cwd: Path | None) -> list[str]:
    own = Path(sysconfig.get_path("scripts"), name)
    if shutil.which(name) == str(own) or not own.exists():
        return [name]
    return [os.path.relpath(own, cwd) if own.is_relative_to(Path.cwd()) else str(own)]
