"""`make setup` does what is needed, once, and repairs what was interrupted; a stand-in for Python records the calls."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Behaves as `python -c CHECK`, `python -m venv DIR` and, from inside DIR, as `python -m pip ...`.
STAND_IN = """#!/bin/sh
case "$1 $2" in
  "-c "*) exit ${TOO_OLD:-0} ;;
  "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && echo "venv" >> calls ;;
  "-m pip") echo "pip $*" >> calls; touch .venv/debris; exit ${PIP_FAILS:-0} ;;
esac
"""

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


class Checkout:
    """A copy of the files that `make setup` reads."""

    def __init__(self, path: Path):
        self.path = path
        for name in (
            "Makefile",
            "pyproject.toml",
            "constraints/cpu.txt",
            "constraints/distributed.txt",
            "rlhf_host/__init__.py",
        ):
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, path / name)
        self.plugin("builtin_algos/rlhf-plugin-one")
        (path / "python").write_text(STAND_IN)
        (path / "python").chmod(0o755)

    def plugin(self, name: str) -> Path:
        project = self.path / "plugins" / name / "pyproject.toml"
        project.parent.mkdir(parents=True)
        project.write_text("[project]\n")
        return project

    def make(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        command = ["make", "--no-print-directory", "PYTHON=./python", *arguments]
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("MAKE") and key != "MFLAGS"}
        return subprocess.run(command, cwd=self.path, env={**inherited, **env}, capture_output=True, text=True)

    def calls(self) -> list[str]:
        """What the stand-in was asked for since the last look."""
        path = self.path / "calls"
        found = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return found


@pytest.fixture
def checkout(tmp_path) -> Checkout:
    return Checkout(tmp_path)


def test_setup_installs_the_host_and_every_plugin_with_the_constraints(checkout):
    checkout.plugin("builtin_rewards/rlhf-plugin-two")
    assert checkout.make("setup").returncode == 0
    made, builder, packages = checkout.calls()
    assert made == "venv"
    assert builder.endswith("-c constraints/cpu.txt hatchling editables setuptools")
    assert "-c constraints/cpu.txt" in packages
    editables = re.findall(r"-e (\S+)", packages)
    assert editables == [".[dev]", "plugins/builtin_algos/rlhf-plugin-one", "plugins/builtin_rewards/rlhf-plugin-two"]


def test_the_distributed_libraries_come_on_top_without_their_dependencies(checkout):
    assert checkout.make("setup-distributed").returncode == 0
    *_, added = checkout.calls()
    assert added.endswith("-c constraints/cpu.txt --no-deps -r constraints/distributed.txt")
    checkout.make("setup-distributed")
    assert checkout.calls() == []
    (checkout.path / "constraints/distributed.txt").write_text("ray\n")
    checkout.make("setup-distributed")
    assert len(checkout.calls()) == 1


def test_a_second_setup_does_nothing(checkout):
    checkout.make("setup")
    checkout.calls()
    again = checkout.make("setup")
    assert again.returncode == 0
    assert checkout.calls() == []


@pytest.mark.parametrize(
    "name", ["pyproject.toml", "constraints/cpu.txt", "plugins/builtin_algos/rlhf-plugin-one/pyproject.toml"]
)
def test_a_changed_file_brings_the_environment_up_to_date(checkout, name):
    checkout.make("setup")
    checkout.calls()
    path = checkout.path / name
    before = path.read_text()
    path.write_text(before + "# changed\n")
    checkout.make("setup")
    assert len(checkout.calls()) == 3
    path.write_text(before)
    checkout.make("setup")
    assert len(checkout.calls()) == 3, "going back is a change too"


def test_a_new_plugin_is_installed(checkout):
    checkout.make("setup")
    checkout.calls()
    checkout.plugin("builtin_agents/rlhf-plugin-three")
    checkout.make("setup")
    assert "-e plugins/builtin_agents/rlhf-plugin-three" in checkout.calls()[-1]


def test_an_interrupted_setup_is_done_anew(checkout):
    assert checkout.make("setup", PIP_FAILS="1").returncode != 0
    assert (checkout.path / ".venv/debris").exists()
    checkout.calls()
    (checkout.path / ".venv/half-a-package").touch()
    assert checkout.make("setup").returncode == 0
    assert len(checkout.calls()) == 3
    assert not (checkout.path / ".venv/half-a-package").exists()


def test_an_old_python_is_refused_by_name(checkout):
    found = checkout.make("setup", TOO_OLD="1")
    assert found.returncode != 0
    assert "needs Python 3.11 or newer" in found.stderr
    assert "./python" in found.stderr
    assert not (checkout.path / ".venv").exists()


def test_the_first_target_lists_the_others(checkout):
    text = checkout.make().stdout
    found = re.findall(r"^make (\S+)", text, re.MULTILINE)
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    assert found[:3] == ["help", "setup", "setup-distributed"]
    assert sorted(found) == sorted(targets)


@pytest.mark.parametrize(
    "target",
    ["quickstart", "test", "wheels", "test-wheels", "lint", "docs", "smollm2", "oracles", "learning-matrix", "results"],
)
def test_whatever_runs_sets_up_first(checkout, target):
    commands = checkout.make("--dry-run", target).stdout
    assert "-m venv .venv" in commands


def test_wheels_are_built_into_dist(checkout):
    assert checkout.make("--dry-run", "wheels").stdout.endswith(".venv/bin/python scripts/wheels.py dist\n")


def test_the_quickstart_is_the_command_of_the_readme(checkout):
    assert (
        checkout.make("--dry-run", "quickstart").stdout.splitlines()[-1]
        == ".venv/bin/rlhf train --algo rloo --reward math_verifier"
    )
