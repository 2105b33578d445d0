"""Operating systems: where the host cannot run, its import says so before that of a module which is not there."""

from __future__ import annotations

import sys
from pathlib import Path


def refuse_others() -> None:
    """Raises ``ImportError`` on Windows; the command ends with the message alone."""
    if sys.platform == "win32":
        problem = "rlhf-host runs on Linux and macOS; on Windows, install it inside WSL 2 (wsl --install)"
        raise SystemExit(f"Error: {problem}") if Path(sys.argv[0]).stem == "rlhf" else ImportError(problem)
