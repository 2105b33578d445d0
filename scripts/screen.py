"""A terminal of 80 columns for programs, and what is left on its screen."""

from __future__ import annotations

import os
import pty
import re
import signal
import struct
import subprocess
import termios
from collections.abc import Mapping
from fcntl import ioctl
from pathlib import Path

COLUMNS, ROWS = 80, 40


def run(command: str, cwd: Path, environment: Mapping[str, str], interrupt_at: str | None = None) -> tuple[int, list[str]]:
    """A shell command's exit code and the lines it left. Where ``interrupt_at`` appears, Ctrl-C is typed once."""
    outer, inner = pty.openpty()
    ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    shell = subprocess.Popen(
        ["bash", "-c", command],
        cwd=cwd,
        env=dict(environment),
        stdin=inner,
        stdout=inner,
        stderr=inner,
        start_new_session=True,
        preexec_fn=_take_the_terminal,
    )
    os.close(inner)
    seen = b""
    while True:
        try:
            part = os.read(outer, 65536)
        except OSError:  # Linux says so when the other end is closed
            break
        if not part:
            break
        seen += part
        if interrupt_at and interrupt_at.encode() in seen:
            os.write(outer, b"\x03")
            interrupt_at = None
    os.close(outer)
    return shell.wait(), left(seen.decode(errors="replace"))


def _take_the_terminal() -> None:
    ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored where this runs in the background


def left(text: str) -> list[str]:
    """The lines after carriage returns, cursor movements and erasures; colours are dropped."""
    lines, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()=>].?|[\r\n]|[^\x1b\r\n]+|\x1b", text):
        if token == "\n":
            row, column = row + 1, 0
            lines += [""] * (row - len(lines) + 1)
        elif token == "\r":
            column = 0
        elif token.startswith("\x1b"):
            count = int(re.sub(r"\D", "", token) or 1)
            if token.endswith("A"):
                row = max(row - count, 0)
            elif token.endswith("K"):
                lines[row] = "" if "2" in token else lines[row][:column]
        else:
            lines[row] = lines[row][:column].ljust(column) + token + lines[row][column + len(token) :]
            column += len(token)
    return [line.rstrip() for line in lines]
