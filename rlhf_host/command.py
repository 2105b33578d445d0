"""Commands for messages, in a form that works when pasted into the user's shell."""

from __future__ import annotations

import os
import shlex
import shutil
import sysconfig
from pathlib import Path


def rlhf(*arguments: object) -> str:
    """Returns ``rlhf`` with these arguments, quoted. Its path is included if the shell would not find it, as in an environment
    that is not activated.
    """
    own = Path(sysconfig.get_path("scripts"), "rlhf")
    found = shutil.which("rlhf") == str(own) or not own.exists()
    program = "rlhf" if found else os.path.relpath(own) if own.is_relative_to(Path.cwd()) else str(own)
    return shlex.join([program, *map(str, arguments)])
