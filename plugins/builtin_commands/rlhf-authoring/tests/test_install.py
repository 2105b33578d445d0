"""``rlhf plugins install`` and ``uninstall``: through the real pip, into an environment made for the test."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
import rlhf_authoring

import rlhf_host
from rlhf_host.installed import install_line
from rlhf_host.plugins.catalogue import offered

HOST = f"rlhf-host=={rlhf_host.__version__}"
HELD = shlex.split(install_line("rlhf-host"))[2:-1]
"""Constraints that hold pip to the wheels of a clone, while no package index has the packages."""


def wheel(folder, name, requires="rlhf-host>=0.10,<0.11"):
    """A plugin distribution as a wheel."""
    module = name.replace("-", "_")
    path = folder / f"{module}-1.0-py3-none-any.whl"
    info = f"{module}-1.0.dist-info"
    files = {
        f"{module}.py": "class X: ...\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: {requires}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[rlhf.rewards]\n{module}_one = {module}:X\n{module}_two = {module}:X\n",
    }
    record = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(file, text)
    return path


@pytest.fixture
def fresh(tmp_path, repository):
    """The command line in an environment of its own, which sees this one's packages and keeps what it installs."""
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    packages = next((tmp_path / "env").glob("lib/python*/site-packages"))
    sources = (str(Path(module.__file__).parents[1]) for module in (rlhf_host, rlhf_authoring))
    ours = [sysconfig.get_paths()["purelib"], *sources]
    (packages / "ours.pth").write_text("\n".join(dict.fromkeys(ours)) + "\n")

    def run(*arguments, code=0, answer=""):
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        command = [tmp_path / "env" / "bin" / "python", "-m", "rlhf_host.cli.main", "plugins", *map(str, arguments)]
        environment |= {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        done = subprocess.run(command, env=environment, input=answer, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    run.packages = packages
    return run


@pytest.mark.skipif(os.name == "nt", reason="environments are laid out otherwise there")
def test_a_wheel_comes_and_goes(fresh, tmp_path):
    path = wheel(tmp_path, "cli-judges")
    done = fresh("install", path)
    assert done.stdout.startswith(f"$ {tmp_path}/env/bin/python -m pip install {path} {HOST}\n")
    assert done.stdout.splitlines()[-2:] == [
        "reward cli_judges_one from cli-judges 1.0: ok",
        "reward cli_judges_two from cli-judges 1.0: ok",
    ]
    assert (fresh.packages / "cli_judges.py").exists()
    listed = {row["name"] for row in json.loads(fresh("--json", "--kind", "reward").stdout)}
    assert {"cli_judges_one", "cli_judges_two"} <= listed

    asked = fresh("uninstall", "cli_judges_one", answer="n\n", code=1)
    assert "cli-judges will be removed, with reward cli_judges_one, reward cli_judges_two" in asked.stdout
    assert (fresh.packages / "cli_judges.py").exists()
    fresh("uninstall", "cli_judges_one", "--yes")
    assert not (fresh.packages / "cli_judges.py").exists()
    assert "cli_judges_one" not in fresh("--json").stdout


@pytest.mark.skipif(os.name == "nt", reason="environments are laid out otherwise there")
def test_a_plugin_for_another_host_is_refused_and_the_host_stays(fresh, tmp_path):
    done = fresh("install", wheel(tmp_path, "cli-old", "rlhf-host<0.9"), code=1)
    assert "Error: pip failed with exit code 1" in done.stderr
    assert not (fresh.packages / "cli_old.py").exists()


@pytest.fixture
def plugins(rlhf_here):
    return lambda *arguments: rlhf_here("plugins", *arguments)


def test_names_of_the_catalogue_become_their_distributions(plugins):
    done = plugins("install", "--dry-run", "grpo", "dr_grpo", "math_verifier", "rlhf-plugin-ppo")
    words = shlex.split(done.stdout)
    assert words[:4] == [sys.executable, "-m", "pip", "install"]
    assert words[4:] == [*HELD, "rlhf-plugin-grpo", "rlhf-plugin-math-verifier", "rlhf-plugin-ppo", HOST]
    words = shlex.split(plugins("install", "--dry-run", "-U", "rloo").stdout)
    assert words[4:] == [*HELD, "--upgrade", "rlhf-plugin-rloo", HOST]
    words = shlex.split(plugins("install", "--dry-run", "rloo", "--find-links", "wheels/").stdout)
    assert words[4:] == ["-c", "wheels/wheels.txt", "rlhf-plugin-rloo", HOST]
    words = shlex.split(plugins("install", "--dry-run", "rloo", "--find-links", "https://example.org/w").stdout)
    assert words[4:-2] == ["--find-links", "https://example.org/w", "-c", "https://example.org/w/wheels.txt"]


@pytest.mark.skipif(not HELD, reason="a package index has the packages")
def test_without_the_folder_of_wheels_nothing_is_taken_from_an_index(plugins, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for flags, folder in (([], "dist"), (["--find-links", "wheels"], "wheels")):
        done = plugins("install", "rloo", *flags)
        assert (done.exit_code, done.stdout) == (2, "")
        assert done.stderr.startswith(f"Error: no {folder}/wheels.txt is here: make wheels, in a clone, writes it")


def test_wheels_of_another_host_are_refused_because_pip_would_replace_this_one(plugins, tmp_path):
    (tmp_path / "wheels.txt").write_text("--find-links .\nrlhf-host==0.1.0+local\nrlhf-plugin-rloo==0.1.0+local\n")
    done = plugins("install", "rloo", "--find-links", tmp_path)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(
        f"Error: {tmp_path}/wheels.txt has rlhf-host 0.1.0+local, with which pip would replace this one"
    )


def test_every_name_of_the_catalogue_can_be_installed(plugins):
    known = {}
    for names in offered().values():
        for name, offer in names.items():
            known.setdefault(name, {})[offer.distribution] = offer
    for name, offers in known.items():
        if len(offers) == 1:
            (offer,) = offers.values()
            words = shlex.split(plugins("install", "--dry-run", name).stdout)
            assert words[4:] == [*shlex.split(offer.line)[2:], HOST]
    assert plugins("install", "--dry-run", "prm").stderr == (
        "Error: 'prm' comes with rlhf-plugin-reward-model and rlhf-plugin-reward-model-training: give the distribution\n"
    )


def test_folders_and_wheels_are_paths_to_pip_and_never_names(plugins, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mine = tmp_path / "rlhf-plugin-mine"
    mine.mkdir()
    refused = plugins("install", "--dry-run", "rlhf-plugin-mine")
    assert (refused.exit_code, refused.stderr) == (
        2,
        "Error: rlhf-plugin-mine is not a distribution: it has no pyproject.toml\n",
    )
    (mine / "pyproject.toml").write_text("")
    for given in ("rlhf-plugin-mine", "./rlhf-plugin-mine"):
        assert shlex.split(plugins("install", "--dry-run", given).stdout)[4] == "./rlhf-plugin-mine"
    assert shlex.split(plugins("install", "--dry-run", mine).stdout)[4] == str(mine)
    monkeypatch.chdir(mine)
    for given in (".", "../rlhf-plugin-mine"):
        assert shlex.split(plugins("install", "--dry-run", given).stdout)[4] == given


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("grop", "'grop' is not in the catalogue; did you mean 'grpo'"),
        ("requests", "'requests' is not in the catalogue; install what others publish with pip, by a name you have checked"),
        ("git+https://example.org/x", "git+https://example.org/x: no such folder or wheel"),
        ("none/such", "none/such: no such folder or wheel"),
        ("rloo.whl", "rloo.whl: no such folder or wheel"),
        ("grpo==1.0", "'grpo==1.0' is not in the catalogue; did you mean 'grpo'?"),
    ],
)
def test_other_names_are_refused_and_nothing_is_run(plugins, name, line):
    done = plugins("install", name)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(f"Error: {line}")


@pytest.mark.usefixtures("others")
def test_what_goes_is_the_whole_distribution_and_never_the_host(plugins):
    assert shlex.split(plugins("uninstall", "--dry-run", "dr_grpo", "rlhf_plugin.grpo").stdout)[3:] == [
        "uninstall",
        "--yes",
        "rlhf-plugin-grpo",
    ]
    assert plugins("uninstall", "kl").stderr == "Error: 'kl' is part of rlhf-host itself; --disable kl leaves it out\n"
    assert plugins("uninstall", "rlhf-host").stderr.startswith(
        "Error: rlhf-host is no plugin: pip uninstall rlhf-host removes it"
    )
    assert plugins("uninstall", "rlooo").stderr == "Error: 'rlooo' is not installed; did you mean 'rloo'?\n"
