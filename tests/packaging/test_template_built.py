"""The template for plugins is found wherever ``rlhf plugins new`` may come from, and by ``cookiecutter`` itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ..conftest import ROOT, build_wheel

PROJECT = ROOT / "plugins/builtin_commands/rlhf-authoring"
NEW = ["plugins", "new", "reward", "shorter"]


def files_of(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def editable(rlhf, tmp_path) -> list[str]:
    """Files that the command of this environment, where the package is installed from the clone, writes."""
    rlhf.run(*NEW, "--output", tmp_path / "editable")
    return files_of(tmp_path / "editable")


@pytest.mark.parametrize("flags", [["--wheel"], []], ids=["from the clone", "from the sdist"])
def test_a_wheel_writes_what_the_clone_does(editable, flags, new_environment, tmp_path):
    host, authoring = build_wheel(ROOT, tmp_path / "host", "--wheel"), build_wheel(PROJECT, tmp_path / "authoring", *flags)
    environment = new_environment(host, authoring)
    environment("rlhf", *NEW, "--output", tmp_path / "new", cwd=tmp_path)
    assert files_of(tmp_path / "new") == editable
    assert any(name.endswith("pyproject.toml") for name in editable)


def test_cookiecutter_alone_writes_a_project(tmp_path):
    command = [Path(sys.executable).with_name("cookiecutter"), ROOT / "plugin_template", "--no-input", "--output-dir", tmp_path]
    subprocess.run(list(map(str, command)), check=True, capture_output=True)
    assert len(list(tmp_path.glob("*/pyproject.toml"))) == 1
