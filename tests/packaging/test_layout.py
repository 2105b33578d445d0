"""Layout of the repository's top, which is fixed, so that a newcomer finds each part where the README says."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FIXED = {
    *("rlhf_host", "plugins/builtin_algos", "plugins/builtin_rewards", "plugins/builtin_agents", "plugin_template", "tests"),
    *("pyproject.toml", "README.md"),
}
BESIDE = {
    *(
        ".ci",
        ".dockerignore",
        ".github",
        ".gitignore",
        ".pre-commit-config.yaml",
        "CITATION.cff",
        "CODE_OF_CONDUCT.md",
        "CONTRIBUTING.md",
        "Dockerfile",
        "LICENSE",
        "Makefile",
        "SECURITY.md",
        "benchmarks",
        "constraints",
        "docs",
        "examples",
    ),
    *("mkdocs.yml", "plugins", "scripts"),
}


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("needs a clone")
    return listed.stdout.splitlines()


def test_the_fixed_parts_are_there(tracked):
    assert [part for part in FIXED if not any(file == part or file.startswith(f"{part}/") for file in tracked)] == []


def test_nothing_else_is_at_the_top(tracked):
    assert {file.split("/")[0] for file in tracked} == {part for part in FIXED | BESIDE if "/" not in part}


def test_the_template_is_one_for_cookiecutter(tracked):
    inside = [file for file in tracked if file.startswith("plugin_template/")]
    assert "plugin_template/cookiecutter.json" in inside
    assert any(file.startswith("plugin_template/{{cookiecutter.") for file in inside)
    assert json.loads((ROOT / "plugin_template/cookiecutter.json").read_text(encoding="utf-8"))
