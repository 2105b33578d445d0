"""The options and defaults of other projects that ``rlhf translate`` knows are those of the published packages."""

from __future__ import annotations

import importlib.util

import pytest
from rlhf_translate import versions
from rlhf_translate.page import newest
from rlhf_translate.programs import METHODS, PROJECTS
from rlhf_translate.projects import KNOWN

from .conftest import ORACLES, ROOT


@pytest.fixture(scope="module")
def reader():
    """Returns what reads packages."""
    path = ROOT / "scripts/foreign_options.py"
    if not path.is_file():
        pytest.skip("the scripts of the repository are not here")
    spec = importlib.util.spec_from_file_location("foreign_options", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("folder", "project", "version"),
    [("openrlhf", "openrlhf", "0.11.2"), ("trl", "trl", "1.16.0"), ("trl-1.9.2", "trl", "1.9.2"), ("verl", "verl", "0.9.1")],
)
def test_those_of_a_package_are_in_the_table(reader, folder, project, version):
    package = ORACLES / folder / project
    if not package.is_dir():
        pytest.skip("make oracles fetches the published packages")
    programs = reader.read(project, package)
    assert programs
    for program, options in programs.items():
        known = {name: versions.default_of(project, program, name, version) for name in versions.options_of(project, program)}
        theirs = {name: reader.plain(value) for name, value in options.items()}
        theirs = {name: tuple(value) if isinstance(value, list) else (value,) for name, value in theirs.items()}
        assert {name: value for name, value in known.items() if value is not None} == theirs, program


@pytest.mark.parametrize(("project", "method"), [(project, method) for project in METHODS for method in METHODS[project]])
def test_every_default_that_matters_is_one_of_the_projects(project, method):
    known = {newest(PROJECTS[project], name) for name in (*options(project), "")}
    known |= {KNOWN[project].aliases.get(name, name) for name in known}
    assert set(KNOWN[project].matters(method)) <= known


def options(project):
    places = {"actor": "actor_rollout_ref.actor", "critic": "critic", "optim": "optim"}
    parts = [
        (places[group], f"{group}={part}")
        for group, parts in versions.groups_of(project).items()
        for part in parts
        if group in places
    ]
    return {name for method in METHODS[project] for name in versions.options_of(project, method, parts)}


def test_a_version_has_the_names_of_its_time():
    found = versions.recognise("openrlhf", "ppo_ray", ["vllm_is_truncated_threshold", "use_icepop", "pretrain"])
    assert (found.first, found.number) == ("0.9.1", "0.9.2")
    assert versions.default_of("openrlhf", "ppo_ray", "vllm_is_truncated_threshold", "0.9.0") == ("2",)
    assert versions.default_of("openrlhf", "ppo_ray", "vllm_is_truncated_threshold", "0.10.2") is None
    assert versions.recognise("openrlhf", "ppo_ray", ["pretrain"], "0.8").number == "0.8.11"
    assert versions.recognise("trl", "grpo", [], "0.30").number == "0.29.1"
