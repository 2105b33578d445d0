"""Discovery judges installed distributions by their metadata and imports nothing of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import rlhf_host
from rlhf_host.once import looked_up_once
from rlhf_host.plugins import discovery

REWARD = {"rlhf.rewards": "r = disc_mod:Reward"}


def only(distribution):
    (info,) = [info for info in discovery.discover() if info.distribution == distribution]
    return info


def test_a_plugin_is_described_by_its_metadata_and_not_imported(here):
    here.install("disc-a", REWARD, {"disc_mod.py": "raise SystemExit('imported')"}, version="0.3", summary="Judges things.")
    info = only("disc-a")
    assert info == discovery.PluginInfo(
        "reward", "r", "disc-a", "0.3", ">=0.10,<0.11", "ok", "Judges things.", "disc_mod:Reward"
    )
    assert (info.module, info.attribute, info.source) == ("disc_mod", "Reward", "disc-a 0.3")
    assert "disc_mod" not in sys.modules


def test_dates_of_directories_are_looked_at_once_where_nothing_is_installed(here, monkeypatch):
    stat, asked = discovery.os.stat, []
    monkeypatch.setattr(discovery.os, "stat", lambda path, **options: asked.append(path) or stat(path, **options))
    with looked_up_once():
        before = discovery.discover()
        asked.clear()
        assert discovery.discover() == before
        assert asked == []
        here.install("disc-late", REWARD, {"disc_mod.py": ""})
        assert discovery.discover() == before
    assert only("disc-late").status == "ok"


@pytest.mark.parametrize("kind", discovery.GROUPS)
def test_every_kind_has_its_group(here, kind):
    here.install("disc-a", {discovery.GROUPS[kind]: "x = disc_mod:X"}, {"disc_mod.py": ""})
    assert only("disc-a").kind == kind


@pytest.mark.parametrize(
    ("requires", "api", "status"),
    [
        (["rlhf-host>=0.10,<0.11"], ">=0.10,<0.11", "ok"),
        (["rlhf_host (>=0.9, <2)"], ">=0.9,<2", "ok"),
        (["rlhf-host<0.11,>=0.10"], ">=0.10,<0.11", "ok"),
        (["numpy", f"RLHF.Host[ray] ~={rlhf_host.__version__}"], f"~={rlhf_host.__version__}", "ok"),
        (["rlhf-host>=0.9", "rlhf-host<2; python_version > '3'"], ">=0.9,<2", "ok"),
        (["rlhf-host"], "any", "ok"),
        (["rlhf-host @ https://example.org/rlhf-host.whl"], "any", "ok"),
        ([], "unstated", "ok"),
        (["rlhf-host>=9; extra == 'dev'"], "unstated", "ok"),
        (["rlhf-host-tools>=9"], "unstated", "ok"),
        (["rlhf-host>=1,<2"], ">=1,<2", "incompatible"),
        (["rlhf-host>=2,<3"], ">=2,<3", "incompatible"),
        (["rlhf-host>=one"], "unreadable", "incompatible"),
        (["rlhf-host>=1; nonsense"], "unreadable", "incompatible"),
    ],
)
def test_the_requirement_on_the_host_decides_compatibility(here, requires, api, status):
    here.install("disc-a", REWARD, {"disc_mod.py": ""}, requires=requires)
    info = only("disc-a")
    assert (info.api, info.status) == (api, status)
    assert bool(info.problem) == (status != "ok")


def test_an_incompatible_plugin_says_which_host_it_is_for_and_which_this_is(here):
    here.install("disc-a", REWARD, {"disc_mod.py": ""}, requires=["rlhf-host>=2,<3"])
    assert only("disc-a").problem == f"disc-a 1.0 is for rlhf-host >=2,<3, and this is rlhf-host {rlhf_host.__version__}"


@pytest.mark.parametrize(
    ("value", "status"),
    [
        ("disc_pkg.inner.deep:X", "ok"),
        ("disc_pkg:X", "ok"),
        ("disc_pkg.folder.leaf:X", "ok"),
        ("disc_pkg.inner.gone:X", "missing"),
        ("disc_pkg.gone.deep:X", "missing"),
        ("disc_gone:X", "missing"),
        ("disc_pkg.inner.deep.more:X", "missing"),
        ("disc_pkg", "missing"),
    ],
)
def test_the_module_is_looked_for_without_importing_its_parents(here, value, status):
    broken = "raise SystemExit('imported')"
    files = ["__init__.py", "inner/__init__.py", "inner/deep.py", "folder/leaf.py"]  # folder/ is a namespace package
    here.install("disc-a", {"rlhf.algos": f"x = {value}"}, {f"disc_pkg/{file}": broken for file in files})
    info = only("disc-a")
    assert info.status == status
    assert bool(info.problem) == (status == "missing")


def test_a_preset_is_a_file_in_a_package_found_without_importing_it(here):
    here.install(
        "disc-a",
        {"rlhf.presets": "p = disc_pkg.presets:deep-seek.yaml\nq = disc_pkg.presets:gone.yaml"},
        {"disc_pkg/__init__.py": "raise SystemExit('imported')", "disc_pkg/presets/deep-seek.yaml": "seed: 1"},
    )
    p, q = (info for info in discovery.discover() if info.distribution == "disc-a")
    assert (p.status, q.status) == ("ok", "missing")
    assert discovery.preset_file(p) == here.folder / "disc_pkg/presets/deep-seek.yaml"
    assert "gone.yaml" in q.problem


def test_two_distributions_with_one_name_are_a_conflict_that_names_both(here):
    here.install("disc-a", REWARD, {"disc_mod.py": ""})
    here.install("disc-b", REWARD)
    here.install("disc-c", {"rlhf.algos": "r = disc_mod:Algo"})
    a, b, c = only("disc-a"), only("disc-b"), only("disc-c")
    assert (a.status, b.status, c.status) == ("conflict", "conflict", "ok")
    assert a.problem == b.problem == "disc-a and disc-b both provide it; choose with disc-a:r or disc-b:r"


def test_the_first_copy_on_the_path_shadows_later_ones(here, tmp_path, monkeypatch):
    here.install("disc-a", REWARD, {"disc_mod.py": ""}, version="1.0")
    later = type(here)(tmp_path / "later")
    later.install("disc-a", REWARD, version="2.0")
    monkeypatch.setattr(sys, "path", [*sys.path, str(later.folder)])
    info = only("disc-a")
    assert (info.version, info.status) == ("1.0", "ok")


def test_unreadable_metadata_hides_no_other_plugin(here):
    here.install("disc-a", REWARD, {"disc_mod.py": ""})
    (here.install("disc-b", {}) / "entry_points.txt").write_text("[rlhf.rewards]\nno equals sign\n")
    (here.install("disc-c", {}) / "entry_points.txt").write_bytes(b"[rlhf.rewards]\nx = \xff\xfe:y\n")
    (here.install("disc-d", REWARD, {"disc_mod.py": ""}) / "METADATA").unlink()
    listed = {info.distribution for info in discovery.discover()}
    assert "disc-a" in listed
    assert not listed & {"disc-b", "disc-c"}


@pytest.mark.parametrize("style", ["path", "finder"])
def test_editable_installs_are_found(site, tmp_path, style):
    source = tmp_path / "checkout" / "src"
    (source / "disc_pkg").mkdir(parents=True)
    (source / "disc_pkg/__init__.py").write_text("raise SystemExit('imported')")
    (source / "disc_pkg/algo.py").write_text("")
    site.install("disc-a", {"rlhf.algos": "x = disc_pkg.algo:X\ny = disc_pkg.gone:Y"})
    if style == "path":
        (site.folder / "_disc_a.pth").write_text(str(source))
    else:  # as setuptools does it
        (site.folder / "_disc_finder.py").write_text(
            "import importlib.util, sys\n"
            "class Finder:\n"
            "    @classmethod\n"
            "    def find_spec(cls, name, path=None, target=None):\n"
            "        if name == 'disc_pkg':\n"
            f"            return importlib.util.spec_from_file_location(name, {str(source / 'disc_pkg/__init__.py')!r})\n"
            "sys.meta_path.append(Finder)\n"
        )
        (site.folder / "_disc_a.pth").write_text("import _disc_finder")
    program = (
        f"import site; site.addsitedir({str(site.folder)!r})\n"
        "from rlhf_host.plugins.discovery import discover\n"
        "print({info.name: info.status for info in discover() if info.distribution == 'disc-a'})"
    )
    root = Path(rlhf_host.__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "{'x': 'ok', 'y': 'missing'}", done.stderr
