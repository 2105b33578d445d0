"""Workflows of the repository and of the template for plugins: what they run exists, and strangers have no way in."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner
from ruamel.yaml import YAML

from rlhf_host.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
OURS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
PINNED = re.compile(r"uses: ([\w.-]+/[\w./-]+)@([0-9a-f]{40}) # (v\d+\.\d+\.\d+)$")


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A project of the template, as its author pushes it."""
    folder = tmp_path_factory.mktemp("new")
    done = CliRunner().invoke(main, ["plugins", "new", "reward", "shorter", "--output", str(folder)])
    assert done.exit_code == 0, done.output
    return folder / "rlhf-plugin-shorter"


@pytest.fixture(params=[*(path.name for path in OURS), "of the template"])
def workflow(request, project) -> Path:
    template = project / ".github/workflows/test.yml"
    return next((path for path in OURS if path.name == request.param), template)


def test_every_action_is_a_commit_with_its_version_beside_it(workflow):
    uses = [line.strip().removeprefix("- ") for line in workflow.read_text().splitlines() if "uses:" in line]
    assert uses
    assert [line for line in uses if not PINNED.match(line)] == []


def test_one_action_has_one_version_everywhere(project):
    texts = [path.read_text() for path in (*OURS, project / ".github/workflows/test.yml")]
    named = {found.groups() for text in texts for line in text.splitlines() if (found := PINNED.search(line))}
    assert len({action for action, _, _ in named}) == len(named)


def test_every_job_has_the_permissions_that_it_needs_and_an_end(workflow):
    stated = YAML(typ="safe").load(workflow)
    assert stated["permissions"] == {}
    written = {name: job["permissions"] for name, job in stated["jobs"].items()}
    assert all(job["timeout-minutes"] <= 90 for job in stated["jobs"].values())
    publishes = {"docs.yml": {"pages": "write", "id-token": "write"}, "release.yml": {"id-token": "write"}}
    for name, permissions in written.items():
        assert permissions == (publishes[workflow.name] if name == "publish" else {"contents": "read"}), name
    steps = [step for job in stated["jobs"].values() for step in job["steps"]]
    assert all(step["with"]["persist-credentials"] is False for step in steps if "actions/checkout@" in step.get("uses", ""))


def test_nothing_that_a_stranger_writes_gets_into_a_shell_or_meets_a_secret(workflow):
    text = workflow.read_text()
    stated = YAML(typ="safe").load(workflow)
    assert {*(stated.get("on") or stated[True])} <= {"push", "pull_request"}
    runs = [step["run"] for job in stated["jobs"].values() for step in job["steps"] if "run" in step]
    assert [line for line in runs if "${{" in line] == []
    assert "secrets." not in text


def test_what_is_run_exists():
    for path in OURS:
        for command in re.findall(r"run: (.+)", path.read_text()):
            if command.startswith("make "):
                assert re.search(rf"^{command.split()[1]}:", (ROOT / "Makefile").read_text(), re.M), command
            for word in re.findall(r"(?:^|\s)((?:\.ci|scripts|tests|plugins)/[\w./-]+)", command):
                assert (ROOT / word).exists(), command
            assert "-c constraints/cpu.txt" in command or "pip install" not in command


def test_the_pythons_that_are_tested_are_those_of_the_classifiers(project):
    stated = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())
    jobs = YAML(typ="safe").load(ROOT / ".github/workflows/test.yml")["jobs"]
    assert ["3.11", *jobs["python"]["strategy"]["matrix"]["python"]] == stated
    template = YAML(typ="safe").load(project / ".github/workflows/test.yml")
    assert template["jobs"]["test"]["strategy"]["matrix"]["python"] == stated
    theirs = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (project / "pyproject.toml").read_text())
    assert theirs == stated


def test_forms_of_issues_have_what_the_code_host_reads():
    assert {path.name for path in FORMS} == {"bug.yml", "config.yml", "idea.yml"}
    for path in FORMS:
        form = YAML(typ="safe").load(path)
        if path.name == "config.yml":
            assert form["contact_links"][0]["url"].endswith("/security/advisories/new")
            continue
        assert {"name", "description", "labels", "body"} == form.keys()
        names = [part["id"] for part in form["body"]]
        assert len({*names}) == len(names)
        assert {part["type"] for part in form["body"]} <= {"textarea", "input", "dropdown", "checkboxes", "markdown"}


@pytest.mark.parametrize("tool", ["zizmor", "actionlint"])
def test_linters_of_workflows_find_nothing(project, tool):
    """``make lint-workflows`` brings them."""
    program = shutil.which(tool) or shutil.which(tool, path=str(ROOT / "build/workflows/bin"))
    if program is None:
        pytest.skip(f"needs {tool}: make lint-workflows")
    theirs = project / ".github/workflows/test.yml"
    words = ["--offline", "--persona=pedantic", ROOT / ".github", theirs] if tool == "zizmor" else [*OURS, theirs]
    done = subprocess.run([program, *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
