"""Operating systems on which nothing runs: named before anything is imported that they lack."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import sys
sys.platform = "win32"
sys.modules |= dict.fromkeys(("fcntl", "resource", "pwd", "termios"))
sys.argv = [{name!r}]
import {module}
"""
SAID = "rlhf-host runs on Linux and macOS; on Windows, install it inside WSL 2 (wsl --install)"


@pytest.mark.parametrize("module", ["rlhf_host", "rlhf_host.cli.main", "rlhf_host.testing"])
@pytest.mark.parametrize(("name", "said"), [("rlhf", f"Error: {SAID}"), ("mine.py", f"ImportError: {SAID}")])
def test_windows_is_refused_by_name(module, name, said):
    done = subprocess.run([sys.executable, "-c", CODE.format(name=name, module=module)], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == said
    assert ("Traceback" in done.stderr) == (name != "rlhf")
