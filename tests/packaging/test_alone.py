"""A plugin's wheel, alone with the host's, contract suites and what it requires in a clean environment, passes its own tests.

`make test-wheels` does so with every distribution, which takes minutes; `make test` with the first one. Trackers get the library
that they are for as well: from `build/trackers`, or from a package index.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECTS = {path.parent.name: path.parent for path in sorted(ROOT.glob("plugins/*/*/pyproject.toml"))}
CHOSEN = list(PROJECTS) if os.environ.get("RLHF_TEST_WHEELS") == "all" else ["rlhf-plugin-rloo"]
TRACKERS = ROOT / "constraints/trackers.txt"

RUN = """
import sys
from click.testing import CliRunner
from rlhf_host.cli.main import main
print(CliRunner().invoke(main, sys.argv[1:], prog_name="rlhf").stderr)
"""


def test_the_host_alone_says_which_package_has_a_command(wheels, new_environment, tmp_path):
    alone = new_environment(wheels["rlhf-host"])
    index = json.loads((ROOT / "rlhf_host/plugins/index.json").read_text(encoding="utf-8"))
    commands = {
        plugin["name"]: entry["name"]
        for entry in index["distributions"]
        for plugin in entry["plugins"]
        if plugin["kind"] == "command" and entry["name"] != "rlhf-host"
    }
    assert commands["translate"] == "rlhf-translate"
    for name, distribution in commands.items():
        said = alone("python", "-c", RUN, *name.split("."), cwd=tmp_path)
        group, _, last = name.rpartition(".")
        missing = group if group in commands else last
        assert said == f"Error: no command {missing!r} is installed; pip install -c dist/wheels.txt {distribution}\n\n"


def test_the_quickstart_trains_without_the_companions_and_they_can_be_added(wheels, new_environment, tmp_path):
    alone = new_environment(*(wheels[name] for name in ("rlhf-host", "rlhf-plugin-rloo", "rlhf-plugin-math-verifier")))
    quickstart = ("train", "--algo", "rloo", "--reward", "math_verifier")
    alone("rlhf", *quickstart, "--train.steps", "2", "--run-dir", "run", cwd=tmp_path)
    assert (tmp_path / "run/model").is_dir()
    said = alone("python", "-c", RUN, "view", "run", cwd=tmp_path)
    assert said == "Error: no command 'view' is installed; pip install -c dist/wheels.txt rlhf-runs\n\n"
    alone.install(wheels["rlhf-runs"])
    assert "rloo" in alone("rlhf", "show", "run", cwd=tmp_path)


def project_of(folder: Path) -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    return project


@pytest.fixture(scope="module")
def tracker_libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the libraries of trackers that have other versions than those of the shared packages."""
    for made in ROOT.glob("build/trackers/lib/python*/site-packages"):
        return made
    folder = tmp_path_factory.mktemp("trackers")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps", "--no-compile")
    if subprocess.run([*pip, "--target", folder, "-r", TRACKERS], check=False).returncode:
        pytest.skip("no package index has the libraries of constraints/trackers.txt: make setup-trackers")
    return folder


@pytest.mark.timeout(1800)  # contract suites meet plugins that break each rule, some until a deadline
@pytest.mark.parametrize("name", CHOSEN)
def test_a_plugin_alone_with_the_host_passes_its_own_tests(name, wheels, new_environment, tmp_path, request):
    project = project_of(PROJECTS[name])
    folders = {"rlhf-host": ROOT, **PROJECTS}
    names = {name, "rlhf-authoring", *(Requirement(text).name for text in project["dependencies"])} & wheels.keys()
    alone = new_environment(*(wheels[one] for one in names))
    optional = {Requirement(text).name for texts in project.get("optional-dependencies", {}).values() for text in texts}
    apart = {canonicalize_name(Requirement(line).name) for line in TRACKERS.read_text().splitlines() if line[0] != "#"}
    if optional & apart:
        alone.put_before(request.getfixturevalue("tracker_libraries"))
    listed = json.loads(alone("rlhf", "plugins", "--json", cwd=tmp_path))
    assert {plugin["distribution"] for plugin in listed} == {
        one for one in names if project_of(folders[one]).get("entry-points", {}).keys() - {"rlhf.python"}
    }
    assert {plugin["status"] for plugin in listed} == {"ok"}
    # A copy, so that nothing of the source tree beside the tests can stand in for what was installed.
    shutil.copytree(PROJECTS[name] / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    said = alone("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", "tests", cwd=tmp_path)
    print(said.splitlines()[-1])
    assert not (optional & apart and "skipped" in said), said
