"""Landlock: limits the paths that a process and everything that it starts can open, and keeps their signals inside."""

import os
import struct

from .kernel import PR_SET_NO_NEW_PRIVS, call, control

CREATE, ADD, RESTRICT = 444, 445, 446
READ = (1 << 0) | (1 << 2) | (1 << 3)  # execute, read files, list directories
ALL = (1 << 13) - 1
SINCE = ((13, 2), (14, 3), (15, 5))
"""Later rights over files: bit, first version that has it."""
OF_FILES = (1 << 0) | (1 << 1) | (1 << 2) | (1 << 14) | (1 << 15)
"""Rights that a rule may give for a path that is not a directory."""


def version() -> int:
    """Returns the version of Landlock; 0: the kernel has none."""
    try:
        return call(CREATE, None, 0, 1)
    except OSError:
        return 0


def restrict(readable, writable) -> None:
    """Allows from now on only these: paths, or open directories and files. No TCP, no signals outside."""
    known = version()
    rights = ALL | sum(1 << bit for bit, since in SINCE if known >= since)
    attributes = struct.pack("QQQ", rights, 3 if known >= 4 else 0, 3 if known >= 6 else 0)
    attributes = attributes[: 8 if known < 4 else 16 if known < 6 else 24]
    rules = call(CREATE, attributes, len(attributes), 0)
    for places, access in ((readable, READ), (writable, rights)):
        for place in places:
            opened = os.open(place, os.O_PATH | os.O_CLOEXEC) if isinstance(place, str) else os.dup(place)
            is_folder = os.stat(opened).st_mode & 0o170000 == 0o040000
            call(ADD, rules, 1, struct.pack("=Qi", access & rights & (-1 if is_folder else OF_FILES), opened), 0)
            os.close(opened)
    control(PR_SET_NO_NEW_PRIVS, 1)
    call(RESTRICT, rules, 0)
    os.close(rules)
