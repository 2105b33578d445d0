"""`make setup` does what is needed, once, and repairs what was interrupted; a stand-in for Python records the calls."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Behaves as `python -c CHECK`, `python -m venv DIR` and, from inside DIR, as `python scripts/install.py ...`.
# Of the installations of a setup, number FAILS fails; number KILLED ends with make itself, as by a power cut.
STAND_IN = """#!/bin/sh
case "$1 $2" in
  "-c "*) exit ${TOO_OLD:-0} ;;
  "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && echo "venv" >> calls ;;
  "scripts/install.py "*)
    echo "$*" >> calls
    touch .venv/debris
    count=$(grep -c install.py calls)
    if [ "$count" = "$KILLED" ]; then kill -9 $PPID; fi
    [ "$count" != "$FAILS" ] ;;
esac
"""

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


@pytest.fixture(scope="module")
def few() -> list[str]:
    """Folders of the plugins that the quickstart installs."""
    makefile = "include Makefile\nprint: ; @echo $(QUICKSTART_PROJECTS)\n"
    command = ["make", "--no-print-directory", "--file=-", "print"]
    printed = subprocess.run(command, cwd=ROOT, input=makefile, capture_output=True, text=True, check=True).stdout
    return re.findall(r"(plugins/\S+)/pyproject.toml", printed)


class Checkout:
    """A copy of the files that `make setup` reads."""

    def __init__(self, path: Path, plugins: list[str]):
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
        for plugin in plugins:
            self.plugin(plugin)
        (path / "python").write_text(STAND_IN)
        (path / "python").chmod(0o755)

    def plugin(self, name: str) -> Path:
        project = self.path / name / "pyproject.toml"
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
def checkout(tmp_path, few) -> Checkout:
    return Checkout(tmp_path, [*few, "plugins/builtin_algos/rlhf-plugin-one"])


def editables(call: str) -> list[str]:
    return re.findall(r"-e (\S+)", call)


def test_the_quickstart_installs_only_what_it_needs_and_setup_the_host_and_every_plugin(checkout, few):
    checkout.plugin("plugins/builtin_rewards/rlhf-plugin-two")
    assert checkout.make("quickstart").returncode != 0  # the stand-in brings no rlhf
    made, builder, packages = checkout.calls()
    assert made == "venv"
    assert builder.endswith("-c constraints/cpu.txt hatchling editables setuptools")
    assert "-c constraints/cpu.txt" in packages
    assert [name.removesuffix("[view]") for name in editables(packages)] == [".", *few]
    checkout.make("quickstart")
    assert checkout.calls() == []
    assert checkout.make("setup").returncode == 0
    (rest,) = checkout.calls()
    assert "-c constraints/cpu.txt" in rest
    more = ["plugins/builtin_algos/rlhf-plugin-one", "plugins/builtin_rewards/rlhf-plugin-two"]
    assert sorted(editables(rest)) == sorted([".[dev]", *few, *more])


def test_the_quickstart_takes_no_package_of_this_project_from_an_index(few):
    """Its packages and what those require of one another: their names on an index may be somebody else's."""
    projects = [tomllib.loads((ROOT / path / "pyproject.toml").read_text(encoding="utf-8"))["project"] for path in ["", *few]]
    (view,) = [each["optional-dependencies"]["view"] for each in projects if each["name"] == "rlhf-runs"]
    required = [line for each in projects for line in each["dependencies"]] + view
    ours = {name for line in required if (name := re.match(r"[\w-]+", line)[0]).startswith("rlhf-")}
    assert ours <= {each["name"] for each in projects}
    assert {"rlhf-plugin-rloo", "rlhf-plugin-math-verifier", "rlhf-kernels-cpu"} <= {each["name"] for each in projects}


def test_the_distributed_libraries_come_on_top_without_their_dependencies(checkout):
    assert checkout.make("setup-distributed").returncode == 0
    *_, added = checkout.calls()
    assert added.endswith("-c constraints/cpu.txt --no-deps -r constraints/distributed.txt")
    for target in ("setup-distributed", "setup", "quickstart"):
        checkout.make(target)
        assert checkout.calls() == []
    (checkout.path / "constraints/distributed.txt").write_text("ray\n")
    checkout.make("setup-distributed")
    assert len(checkout.calls()) == 1
    checkout.make("setup")
    assert checkout.calls() == []


def test_a_second_setup_does_nothing(checkout):
    checkout.make("setup")
    checkout.calls()
    again = checkout.make("setup")
    assert again.returncode == 0
    assert checkout.calls() == []


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        ("pyproject.toml", 4),
        ("constraints/cpu.txt", 4),
        ("plugins/builtin_algos/rlhf-plugin-rloo/pyproject.toml", 4),
        ("plugins/builtin_algos/rlhf-plugin-one/pyproject.toml", 1),  # the quickstart needs it not
    ],
)
def test_a_changed_file_brings_the_environment_up_to_date(checkout, name, calls):
    checkout.make("setup")
    checkout.calls()
    path = checkout.path / name
    before = path.read_text()
    path.write_text(before + "# changed\n")
    checkout.make("setup")
    assert len(checkout.calls()) == calls
    path.write_text(before)
    checkout.make("setup")
    assert len(checkout.calls()) == calls, "going back is a change too"


def test_going_back_is_a_change_for_setup_where_only_the_quickstart_was_brought_up_to_date(checkout):
    checkout.make("setup")
    path = checkout.path / "pyproject.toml"
    before = path.read_text()
    path.write_text(before + "# changed\n")
    checkout.make("quickstart")
    path.write_text(before)
    checkout.calls()
    checkout.make("setup")
    assert len(checkout.calls()) == 4


def test_a_new_plugin_is_installed(checkout):
    checkout.make("setup")
    checkout.calls()
    checkout.plugin("plugins/builtin_agents/rlhf-plugin-three")
    checkout.make("setup")
    assert "-e plugins/builtin_agents/rlhf-plugin-three" in checkout.calls()[-1]


@pytest.mark.parametrize(("number", "how"), [(1, "FAILS"), (2, "KILLED"), (3, "FAILS"), (4, "KILLED")])
def test_an_interrupted_setup_is_done_anew(checkout, number, how):
    """Whichever of its installations it was, and whichever of the three targets comes next."""
    assert checkout.make("setup-distributed", **{how: str(number)}).returncode != 0
    assert (checkout.path / ".venv/debris").exists()
    checkout.calls()
    (checkout.path / ".venv/half-a-package").touch()
    target, calls = [("quickstart", 3), ("setup", 4), ("setup-distributed", 5), ("quickstart", 3)][number - 1]
    checkout.make(target)
    assert len(checkout.calls()) == calls
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
