"""pip takes our wheels of a clone, whatever a stranger puts on a package index under our names, which are not registered."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from .clones import ROOT, small_clone

STRANGERS = [("rlhf-plugin-one", "0.10.99"), ("rlhf-plugin-one", "0.10.0"), ("rlhf-host", "0.10.99"), ("rlhf-host", "0.10.0")]
OURS = {"rlhf-plugin-one": "0.10.0+local", "rlhf-host": "0.10.0+local"}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts")
        module = importlib.import_module("wheels")
        clone = small_clone(tmp_path_factory.mktemp("a clone"))
        (clone / "dist").mkdir()
        (clone / "dist/rlhf_plugin_gone-0.9.0-py3-none-any.whl").write_text("")
        module.build(clone, clone / "dist")
        yield clone / "dist"


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> Path:
    """A package index with newer versions, and with ours again, whose build number is higher."""
    folder = tmp_path_factory.mktemp("index")
    for name, version in STRANGERS:
        module = name.replace("-", "_")
        info, place = f"{module}-{version}.dist-info", folder / name
        place.mkdir(exist_ok=True)
        with zipfile.ZipFile(place / f"{module}-{version}-9-py3-none-any.whl", "w") as archive:
            archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{info}/RECORD", "")
        (place / "index.html").write_text("".join(f'<a href="{file.name}">{file.name}</a>' for file in place.glob("*.whl")))
    return folder


def taken(index: Path, *words: str | Path, code: int = 0) -> dict[str, str]:
    """Name → version of all that the real pip would install."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--isolated",
        "install",
        "--dry-run",
        "--ignore-installed",
    ]
    command = [*pip, "--quiet", "--report", "-", "--index-url", index.as_uri(), *map(str, words)]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    done = subprocess.run(
        command, env={**environment, "PIP_CONFIG_FILE": os.devnull}, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    metadata = [each["metadata"] for each in json.loads(done.stdout)["install"]] if not code else []
    return {each["name"]: each["version"] for each in metadata}


def test_wheels_are_built_of_the_host_and_every_plugin_in_place_of_older_ones(wheels):
    built = {file.name for file in wheels.iterdir()}
    assert built == {"wheels.txt", *(f"{name.replace('-', '_')}-{version}-py3-none-any.whl" for name, version in OURS.items())}
    assert (wheels / "wheels.txt").read_text().splitlines()[1:] == [
        *("--find-links .", "rlhf-host==0.10.0+local", "rlhf-plugin-one==0.10.0+local")
    ]


def test_a_folder_of_wheels_alone_loses_to_a_newer_version_of_a_stranger(wheels, index):
    assert taken(index, "--find-links", wheels, "rlhf-plugin-one") == {"rlhf-plugin-one": "0.10.99"}


@pytest.mark.parametrize("extra", ["", "[all]"])
def test_wheels_txt_holds_pip_to_ours_and_to_what_they_need_of_ours(wheels, index, extra):
    assert taken(index, "-c", wheels / "wheels.txt", f"rlhf-plugin-one{extra}") == OURS
    assert taken(index, "-c", wheels / "wheels.txt", "--upgrade", f"rlhf-host{extra}") == {"rlhf-host": OURS["rlhf-host"]}


def test_the_folder_may_be_copied_and_wheels_of_before_are_gone(wheels, index, tmp_path):
    copy = wheels.rename(tmp_path / "elsewhere")
    try:
        assert taken(index, "-c", copy / "wheels.txt", "rlhf-plugin-one") == OURS
        assert taken(index, "-c", wheels / "wheels.txt", "rlhf-plugin-one", code=1) == {}, "a folder that is not there"
        (copy / "rlhf_plugin_one-0.10.0+local-py3-none-any.whl").rename(tmp_path / "gone")
        assert taken(index, "-c", copy / "wheels.txt", "rlhf-plugin-one", code=1) == {}, "a wheel that is not there"
        (tmp_path / "gone").rename(copy / "rlhf_plugin_one-0.10.0+local-py3-none-any.whl")
    finally:
        copy.rename(wheels)


def test_what_is_installed_stays_as_extras_are_added(index, tmp_path):
    """Lines of the program that only add an extra need nothing more: pip keeps a host that is there."""
    site = tmp_path / "site"
    info = site / "rlhf_host-0.10.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rlhf-host\nVersion: 0.10.0\nProvides-Extra: peft\n")
    (info / "RECORD").write_text("")
    (info / "INSTALLER").write_text("pip\n")
    command = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--dry-run",
        "--index-url",
        index.as_uri(),
    ]
    done = subprocess.run(
        [*command, "rlhf-host[peft]"], env={**os.environ, "PYTHONPATH": str(site)}, capture_output=True, text=True, check=True
    )
    assert "Would install" not in done.stdout
    assert f"Requirement already satisfied: rlhf-host[peft] in {site}" in done.stdout
