"""What comes out of ``rlhf plugins new`` works as it is: for every kind, from wheels, in a clean environment.

All kinds go through each stage at once: a process that imports torch costs seconds, and they share nothing but the environment.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from rlhf_authoring.commands.new import KINDS

DRY_RUNS = """
import json, sys
from click.testing import CliRunner
from rlhf_host.cli.main import main
runs = json.loads(sys.argv[1])
print(json.dumps({kind: [(done := CliRunner().invoke(main, flags)).exit_code, done.output] for kind, flags in runs.items()}))
"""


@dataclass
class Outcome:
    """Of one project's tests: how many passed, and which failed, with what they said."""

    passed: int = 0
    failed: dict[str, str] = field(default_factory=dict)


class Trial:
    """Every kind's project, written and installed in an environment of its own."""

    def __init__(self, environment, folder: Path):
        self.environment, self.folder = environment, folder
        (folder / "wheels").mkdir()
        (folder / "pytest.ini").write_text("[pytest]\n")  # or the first project's settings would be everyone's
        self.commands: dict[str, list[str]] = {}
        for kind in KINDS:
            said = environment("rlhf", "plugins", "new", kind, f"trial-{kind}", cwd=folder)
            (line,) = re.findall(r"^  (?:\S*/)?rlhf (.*)$", said, re.MULTILINE)
            self.commands[kind] = line.split()

    def projects(self) -> dict[str, Path]:
        return {kind: self.folder / f"rlhf-plugin-trial-{kind}" for kind in KINDS}

    def install(self) -> list[Path]:
        """Build a wheel of each and install it."""
        out = self.folder / "wheels"
        shutil.rmtree(out)
        self.environment.pip(
            *("wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", out),
            *self.projects().values(),
        )
        wheels = sorted(out.glob("*.whl"))
        self.environment.install(*wheels)
        return wheels

    def test(self, code: int, select: str = "test") -> dict[str, Outcome]:
        """Run the projects' own tests that ``select`` names."""
        report = self.folder / "report.xml"
        options = ("-q", "-p", "no:cacheprovider", "--import-mode=importlib", "--junitxml", report, "-k", select)
        projects = (path / "tests" for path in self.projects().values())
        self.environment("python", "-m", "pytest", *options, *projects, cwd=self.folder, code=code)
        found = {kind: Outcome() for kind in KINDS}
        for case in ElementTree.parse(report).iter("testcase"):
            place = f"{case.get('classname')}.{case.get('name')}"
            kind = next(kind for kind in sorted(KINDS, key=len) if f"rlhf-plugin-trial-{kind}.tests" in place)
            failures = [*case.findall("failure"), *case.findall("error")]
            if failures:
                found[kind].failed[place.rpartition(".tests.")[2]] = f"{failures[0].get('message')}\n{failures[0].text}"
            elif not case.findall("skipped"):
                found[kind].passed += 1
        return found

    def listed(self) -> dict[str, dict]:
        plugins = json.loads(self.environment("rlhf", "plugins", "--json", cwd=self.folder))
        return {plugin["kind"]: plugin for plugin in plugins if plugin["name"].startswith(("trial_", "trial-"))}


@pytest.fixture(scope="module")
def trial(wheels, new_environment, tmp_path_factory) -> Trial:
    chosen = ("rlhf-host", "rlhf-authoring", "rlhf-plugin-rloo", "rlhf-plugin-math-verifier")
    return Trial(new_environment(*(wheels[name] for name in chosen)), tmp_path_factory.mktemp("trial"))


@pytest.fixture(scope="module")
def installed(trial) -> list[Path]:
    return trial.install()


def test_every_kind_builds_a_wheel(installed):
    assert [path.name for path in installed] == sorted(
        f"rlhf_plugin_trial_{kind.replace('-', '_')}-0.1.0-py3-none-any.whl" for kind in KINDS
    )


def test_every_kind_is_listed_once_it_is_installed(trial, installed):
    listed = trial.listed()
    assert set(listed) == {kind.replace("-", "_") for kind in KINDS}
    for kind, plugin in listed.items():
        assert plugin["distribution"] == f"rlhf-plugin-trial-{kind.replace('_', '-')}"
        assert (plugin["status"], plugin["api"], plugin["version"]) == ("ok", ">=0.10,<0.11", "0.1.0")


def test_every_kind_passes_its_own_tests(trial, installed):
    for kind, tests in trial.test(code=0).items():
        assert tests.failed == {}
        assert tests.passed >= (10 if kind == "command" else 15), f"{kind}: the contract has more tests than that"


def test_the_command_that_was_printed_is_accepted(trial, installed):
    said = trial.environment("python", "-c", DRY_RUNS, json.dumps(trial.commands), cwd=trial.folder)
    results = json.loads(said.splitlines()[-1])
    code, output = results.pop("command")
    assert (code, output) == (2, "Error: RUN_DIR: no such run directory (a run that has just begun has none yet)\n")
    for kind, (code, output) in results.items():
        assert code == 0, output
        assert "The run would be written to" in output
        name = f"trial_{kind.replace('-', '_')}"
        assert (f"{name}: " in output) or (f"from {name}" in output) or (f"rlhf-plugin-trial-{kind} 0.1.0" in output), output


def test_with_its_entry_point_broken_a_plugin_fails_its_own_tests_and_uninstalled_it_is_gone(trial, installed):
    kept = {kind: (path / "pyproject.toml").read_text() for kind, path in trial.projects().items()}
    for kind, path in trial.projects().items():
        broken = re.sub(r'(trial.\w+ = "rlhf_plugin_\w+:)\w+"', r'\1NotThere"', kept[kind])
        assert broken != kept[kind]
        (path / "pyproject.toml").write_text(broken)
    trial.install()
    for kind, tests in trial.test(code=1, select="test_entry_point_loads or test_behaviour").items():
        said = tests.failed["test_contract.TestContract.test_entry_point_loads"]
        assert "NotThere" in said, kind
        if kind != "command":  # whose tests type it
            assert not [name for name in tests.failed if "test_behaviour" in name], "what it does is as it was"
    trial.environment.pip("uninstall", "--quiet", "--yes", *(path.name for path in trial.projects().values()))
    assert trial.listed() == {}
    left = [path for path in trial.environment.home.rglob("*plugin?trial*") if "__pycache__" not in path.parts]
    assert left == [], sys.version
