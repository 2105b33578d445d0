"""Commands that messages suggest can be pasted where the one before was typed."""

import os
import sysconfig
from pathlib import Path

import pytest

from rlhf_host.command import rlhf


@pytest.fixture
def scripts(tmp_path, monkeypatch):
    """An environment's folder of programs, below the working directory."""
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    program = folder / "rlhf"
    program.touch(0o755)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(folder))
    monkeypatch.chdir(tmp_path)
    return folder


def test_the_name_will_do_where_the_shell_finds_it(scripts, monkeypatch):
    monkeypatch.setenv("PATH", f"{scripts}{os.pathsep}{os.environ['PATH']}")
    assert rlhf("train", "--resume", Path("runs/a run")) == "rlhf train --resume 'runs/a run'"


def test_an_environment_that_is_not_activated_is_named(scripts, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert rlhf("eval") == ".venv/bin/rlhf eval"
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    assert rlhf("eval") == f"{scripts}/rlhf eval"
