"""The wheels of the host and of every plugin install and work away from the repository."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import shutil
import tomllib
import zipfile
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from rlhf_host import __version__

ROOT = Path(__file__).resolve().parents[2]
PROJECTS = [ROOT, *(path.parent for path in sorted(ROOT.glob("plugins/*/*/pyproject.toml")))]
NAMES = [path.name for path in PROJECTS[1:]]
LICENCES = {"rlhf-runs": "Apache-2.0 AND MIT"}


@pytest.fixture(scope="session")
def metadata(wheels) -> dict[str, Message]:
    found = {}
    for name, wheel in wheels.items():
        with zipfile.ZipFile(wheel) as archive:
            (path,) = [entry for entry in archive.namelist() if entry.endswith(".dist-info/METADATA")]
            found[name] = HeaderParser().parsestr(archive.read(path).decode())
    return found


@pytest.fixture(scope="session")
def installed(new_environment, wheels):
    return new_environment(*wheels.values())


@pytest.fixture
def clean(installed, tmp_path):
    """Run a program of the clean environment."""
    return lambda program, *arguments: installed(program, *arguments, cwd=tmp_path)


def test_the_projects_at_hand_include_the_first_algorithm_and_reward():
    assert {"rlhf-plugin-rloo", "rlhf-plugin-math-verifier"} <= set(NAMES)


def test_the_command_line_works_from_wheels(clean):
    import rlhf_host

    assert rlhf_host.__version__ in clean("rlhf", "--version")


def test_every_plugin_is_listed_as_ok(clean):
    listed = json.loads(clean("rlhf", "plugins", "--json"))
    assert [plugin for plugin in listed if plugin["status"] != "ok"] == []
    names = {(plugin["kind"], plugin["name"]) for plugin in listed}
    assert {("algo", "rloo"), ("reward", "math_verifier"), ("agent", "single_turn"), ("tracker", "jsonl")} <= names
    metadata = {path.name: tomllib.loads((path / "pyproject.toml").read_text("utf-8"))["project"] for path in PROJECTS[1:]}
    named = {name for name, project in metadata.items() if "entry-points" in project}
    assert {*NAMES} - named == {"rlhf-kernels"}, "a library of others"
    assert {plugin["distribution"] for plugin in listed} == {"rlhf-host", *named}


def test_the_lists_of_plugins_travel_with_the_host(clean):
    assert "pip install -c dist/wheels.txt rlhf-plugin-rloo" in clean("rlhf", "plugins", "search", "rloo")


def test_nothing_comes_from_the_repository(clean, installed):
    code = """
import json, rlhf_host, rlhf_plugin_rloo, sys
print(json.dumps([rlhf_host.__file__, rlhf_plugin_rloo.__file__, sys.path]))
"""
    host, plugin, path = json.loads(clean("python", "-c", code))
    assert Path(host).is_relative_to(installed.home)
    assert Path(plugin).is_relative_to(installed.home)
    assert [entry for entry in path if entry and Path(entry).resolve() in {ROOT, *(p / "src" for p in PROJECTS)}] == []


@pytest.mark.parametrize("name", ["rlhf-host", *NAMES])
def test_metadata_states_licence_python_and_typing(name, wheels, metadata):
    fields = metadata[name]
    assert fields["Name"] == name
    assert fields["License-Expression"] == LICENCES.get(name, "Apache-2.0")
    assert fields["Summary"]
    assert Version(fields["Version"]) == Version(__version__)
    supported = SpecifierSet(fields["Requires-Python"])
    assert supported.contains("3.11")
    assert not supported.contains("3.10")
    with zipfile.ZipFile(wheels[name]) as archive:
        names = archive.namelist()
    assert f"{name.replace('-', '_')}/py.typed" in names
    own = [entry for entry in names if "/_plugin_template/" not in entry]
    assert not [entry for entry in own if "/tests/" in entry or entry.startswith("tests/")]


@pytest.mark.parametrize("name", NAMES)
def test_a_plugin_states_which_hosts_it_was_made_for(name, metadata):
    requirements = [Requirement(text) for text in metadata[name].get_all("Requires-Dist") or []]
    (host,) = [requirement for requirement in requirements if requirement.name == "rlhf-host"]
    this = Version(__version__)
    later = f"{this.major}.{this.minor + 1}.0" if this.major == 0 else f"{this.major + 1}.0.0"
    assert host.specifier.contains(__version__)
    assert not host.specifier.contains(later)
    for other in (requirement for requirement in requirements if requirement.name.startswith("rlhf-plugin-")):
        assert other.specifier == host.specifier, "packages that share something are of one version"


@pytest.mark.parametrize(("name", "project"), [*zip(["rlhf-host", *NAMES], PROJECTS, strict=True)])
def test_no_source_file_is_left_out(name, project, wheels):
    """Ignore rules are honoured by the build, so a folder called ``models`` or ``build`` can vanish unseen."""
    source = project if project == ROOT else project / "src"
    package = source / name.replace("-", "_")
    wanted = {
        path.relative_to(source).as_posix() for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheels[name]) as archive:
        assert wanted <= set(archive.namelist())


def test_the_readme_installs_wheels_of_dist_and_trains(new_environment, wheels, tiny_model, prompts, tmp_path, monkeypatch):
    """``make wheels`` fills ``dist``; pip finds there what the plugins need, the host among it."""
    section = (ROOT / "README.md").read_text().partition("## Install")[2].replace("\\\n", "")
    _, install, train = re.findall(r"^(?:make|pip|rlhf) .*$", section, re.M)
    (tmp_path / "dist").mkdir()
    for wheel in wheels.values():
        shutil.copy(wheel, tmp_path / "dist")
    monkeypatch.syspath_prepend(ROOT / "scripts")
    importlib.import_module("wheels").hold(tmp_path / "dist", Version(__version__))
    fresh = new_environment()
    places = {"dist/wheels.txt": tmp_path / "dist/wheels.txt", "constraints/cpu.txt": ROOT / "constraints/cpu.txt"}
    pip, *arguments = [str(places.get(word, word)) for word in shlex.split(install)]
    fresh.pip(*arguments, "--quiet", "--no-index", "--no-compile")
    small = ["--actor.model", tiny_model, "--data", prompts, "--train.steps", "1", "--train.batch-size", "2"]
    small += ["--rollout.n", "2", "--rollout.max-new-tokens", "4", "--train.threads", "1", "--run-dir", "run"]
    rlhf, *words = shlex.split(train)
    fresh(rlhf, *words, *small, cwd=tmp_path)
    assert pip == "pip"
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 1


def test_the_licence_travels_with_the_host(wheels):
    with zipfile.ZipFile(wheels["rlhf-host"]) as archive:
        (path,) = [entry for entry in archive.namelist() if entry.endswith(".dist-info/licenses/LICENSE")]
        assert "Apache License" in archive.read(path).decode()


def test_the_licence_of_the_charts_travels_with_them(wheels):
    with zipfile.ZipFile(wheels["rlhf-runs"]) as archive:
        [path] = [entry for entry in archive.namelist() if entry.endswith("licenses/src/rlhf_runs/page/uplot/LICENSE")]
        assert "Copyright (c) 2022 Leon Sorokin" in archive.read(path).decode()
        assert archive.read("rlhf_runs/page/uplot/uplot.js").startswith(b"/*! https://github.com/leeoniya/uPlot (v1.6.32) */")


def test_the_names_of_other_projects_travel_with_their_package(wheels):
    with zipfile.ZipFile(wheels["rlhf-translate"]) as archive:
        assert archive.read("rlhf_translate/names.md") == (ROOT / "docs/reference/names.md").read_bytes()


def test_the_recipes_and_their_data_travel_with_the_host(wheels):
    folders = [ROOT / "examples" / part for part in ("recipes", "data")]
    files = [path for folder in folders for path in folder.iterdir() if path.is_file()]
    with zipfile.ZipFile(wheels["rlhf-host"]) as archive:
        for path in files:
            assert archive.read(f"rlhf_host/_examples/{path.parent.name}/{path.name}") == path.read_bytes()
        inside = {name for name in archive.namelist() if name.startswith("rlhf_host/_examples/")}
    assert len(inside) == len(files)


def test_the_template_of_plugins_travels_with_its_package(wheels):
    template = ROOT / "plugin_template"
    wanted = {path.relative_to(template).as_posix() for path in template.rglob("*") if path.is_file()}
    with zipfile.ZipFile(wheels["rlhf-authoring"]) as archive:
        prefix = "rlhf_authoring/_plugin_template/"
        assert {name.removeprefix(prefix) for name in archive.namelist() if name.startswith(prefix)} == wanted
        assert "cookiecutter.json" in wanted
