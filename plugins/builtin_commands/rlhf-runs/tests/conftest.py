from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rlhf_host.commands import main


@pytest.fixture
def rlhf_here(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """The command line in this process."""
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *arguments: CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def rlhf_process() -> Callable[..., subprocess.CompletedProcess[str]]:
    """The command line in a process of its own, which must succeed."""

    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "rlhf_host.cli.main", *map(str, arguments)]
        return subprocess.run(command, env={**os.environ, "COLUMNS": "120"}, capture_output=True, text=True, check=True)

    return run
