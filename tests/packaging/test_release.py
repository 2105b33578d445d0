"""One command raises the version everywhere, builds and checks every distribution, and says what to type next."""

from __future__ import annotations

import importlib
import io
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.version import Version

from .clones import ROOT, small_clone

INDEX, AGAIN = "rlhf_host/plugins/index.json", "python scripts/generate_docs.py"


@pytest.fixture(scope="module")
def scripts():
    """The modules of scripts/, by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts")
        yield importlib.import_module


@pytest.fixture
def release(scripts):
    return scripts("release")


@pytest.fixture
def versions(scripts):
    return scripts("versions")


@pytest.fixture
def clone(tmp_path) -> Path:
    return small_clone(tmp_path / "clone")


def content(clone: Path) -> dict[str, str]:
    listed = subprocess.run(["git", "ls-files"], cwd=clone, capture_output=True, text=True, check=True).stdout.splitlines()
    return {name: (clone / name).read_text(encoding="utf-8") for name in listed}


def test_the_version_and_its_range_are_raised_wherever_they_are_but_in_history(clone, versions):
    changed = versions.raise_version(clone, Version("0.11.0"))
    plugin = "plugins/builtin_algos/rlhf-plugin-one/pyproject.toml"
    assert sorted(changed) == ["CITATION.cff", "docs/plugins.md", plugin, "rlhf_host/__init__.py"]
    about = tomllib.loads((clone / plugin).read_text())["project"]
    assert (about["version"], about["dependencies"]) == ("0.11.0", ["rlhf-host>=0.11,<0.12"])
    text = content(clone)
    assert text["docs/plugins.md"] == "Write `rlhf-host>=0.11,<0.12`, which metadata has as `<0.12,>=0.11`.\n"
    assert text["CITATION.cff"] == "cff-version: 1.2.0\nversion: 0.11.0\n"
    assert ">=0.10,<0.11" in text["docs/changelog.md"]
    assert versions.version_of(clone) == Version("0.11.0")


def test_a_patch_keeps_the_range_and_from_1_0_on_it_is_that_of_the_major_version(versions):
    assert [versions.range_of(Version(text)) for text in ("0.10.0", "0.10.3", "1.0.0", "1.4.2")] == [
        *(">=0.10,<0.11", ">=0.10,<0.11", ">=1,<2", ">=1,<2")
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("0.9.0", "0.9.0 is below the present version, 0.10.0"),
        ("next", "'next' is not a version such as 1.2.0"),
        ("v0.11.0", "'v0.11.0' is not a version such as 1.2.0 or 1.2.0rc1"),
        ("0.11", "'0.11' is not a version such as 1.2.0 or 1.2.0rc1"),
        ("0.11.0+local", "'0.11.0+local' is not a version such as 1.2.0 or 1.2.0rc1"),
    ],
)
def test_what_is_no_next_version_is_refused(clone, versions, text, line):
    with pytest.raises(versions.Refused) as refused:
        versions.next_version(text, clone)
    assert str(refused.value) == line


def test_distributions_of_several_versions_are_refused(clone, versions):
    path = clone / "plugins/builtin_algos/rlhf-plugin-one/pyproject.toml"
    path.write_text(path.read_text().replace('version = "0.10.0"', 'version = "0.10.1"'))
    with pytest.raises(
        versions.Refused, match=r"^rlhf-plugin-one has the version 0.10.1, and rlhf-host 0.10.0: all have one version$"
    ):
        versions.version_of(clone)


def test_what_is_unreleased_becomes_the_section_of_the_version(clone, release, versions):
    path = clone / "docs/changelog.md"
    release.add_section(path, Version("0.11.0"))
    lines = [line for line in path.read_text().splitlines() if line]
    assert lines[1] == "## Unreleased"
    assert lines[2].startswith("## 0.11.0 (20")
    assert lines[3:] == ["It counts (>=0.10,<0.11).", "## 0.9.0 (2026-01-01)", "First."]
    with pytest.raises(versions.Refused, match="nothing is below '## Unreleased', so there is nothing to release"):
        release.add_section(path, Version("0.12.0"))


def test_the_first_release_frees_install_lines_from_the_wheels_of_a_clone(clone, release):
    assert sorted(release.publish_names(clone)) == ["README.md", "scripts/docs_pages/catalogue.py", "template/test.yml"]
    text = content(clone)
    assert "    pip install -c constraints/cpu.txt rlhf-plugin-one\n" in text["README.md"]
    assert text["scripts/docs_pages/catalogue.py"] == "OPTIONS = None\n"
    assert text["template/test.yml"] == "steps:\n  - run: one\n  - run: pip install -e .\n"
    assert [*release.spoken_before(clone)] == ["README.md:5"]
    assert release.publish_names(clone) == []


def test_the_switch_and_the_marks_are_where_the_release_looks_for_them(release):
    assert release.OPTIONS in (ROOT / "scripts/docs_pages/catalogue.py").read_text(encoding="utf-8") or not release.HELD.search(
        (ROOT / "README.md").read_text(encoding="utf-8")
    )
    assert release.UNRELEASED in (ROOT / release.CHANGELOG).read_text(encoding="utf-8")
    (template,) = ROOT.glob("plugin_template/*/.github/workflows/test.yml")
    text = template.read_text(encoding="utf-8")
    assert "rlhf-host/dist" not in release.freed(text)
    assert "{#" not in release.freed(text)


def test_a_release_is_made_in_a_copy_and_then_in_the_clone(clone, release, monkeypatch, capsys):
    before = content(clone)
    monkeypatch.setattr(release, "ROOT", clone)
    monkeypatch.setattr(release, "generate", lambda root: release.run(root, [sys.executable, "scripts/generate_docs.py"]))
    monkeypatch.setattr(release, "twine", lambda root, files: len(files))
    monkeypatch.setattr(sys, "argv", ["release.py", "0.11.0", "--dry-run"])
    release.main()
    assert content(clone) == before
    assert not (clone / "build").exists()
    monkeypatch.setattr(sys, "argv", ["release.py", "0.11.0"])
    with pytest.raises(SystemExit, match=r"files are changed and not committed, such as .+: commit or stash them first"):
        release.main()
    commit = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "--quiet", "--all", "--message"]
    subprocess.run([*commit, "All"], cwd=clone, check=True)
    release.main()
    said = capsys.readouterr().out
    assert "git tag --annotate v0.11.0 --message 'Version 0.11.0' && git push origin v0.11.0\n" in said
    assert [file.name for file in sorted((clone / "build/release").iterdir())] == [
        *("rlhf_host-0.11.0-py3-none-any.whl", "rlhf_host-0.11.0.tar.gz"),
        *("rlhf_plugin_one-0.11.0-py3-none-any.whl", "rlhf_plugin_one-0.11.0.tar.gz"),
    ]
    monkeypatch.setattr(sys, "argv", ["release.py", "--tag", "v0.11.0"])
    release.main()
    monkeypatch.setattr(sys, "argv", ["release.py", "--tag", "v0.12.0"])
    with pytest.raises(SystemExit, match=r"the tag is 'v0.12.0', and the version 0.11.0: a tag is v and the version"):
        release.main()


@pytest.fixture(scope="module")
def built(tmp_path_factory, scripts) -> Path:
    clone = small_clone(tmp_path_factory.mktemp("built"))
    for project in scripts("versions").projects(clone):
        scripts("release").build(clone, project, clone / "out")
    return clone / "out"


NAMES = ("rlhf-host", "rlhf-plugin-one")


def test_whole_distributions_have_no_problems(built, scripts):
    assert [*scripts("archives").problems(built.iterdir(), NAMES, Version("0.10.0"))] == []


@pytest.mark.parametrize(
    ("path", "data", "line"),
    [
        ("rlhf_host-0.10.0.dist-info/licenses/LICENSE", None, "it has no LICENSE"),
        ("rlhf_host/py.typed", None, "rlhf_host/py.typed is missing"),
        ("rlhf_host/__pycache__/a.cpython-311.pyc", b"", "rlhf_host/__pycache__/a.cpython-311.pyc is left behind by a tool"),
        ("rlhf_host/.env", b"", "rlhf_host/.env is left behind by a tool"),
        ("rlhf_host/model.bin", bytes(2**23 + 1), "rlhf_host/model.bin has 8.0 MiB"),
        ("rlhf_host/tests/test_a.py", b"", "rlhf_host/tests/test_a.py is a test"),
        ("tests/test_a.py", b"", "tests/test_a.py is outside of rlhf_host"),
        (INDEX, b'{"distributions": [{"name": "a", "version": "0.9.0"}]}', f"{INDEX} has a 0.9.0: {AGAIN}"),
    ],
)
def test_what_a_wheel_lacks_or_has_by_mistake_is_named(built, scripts, tmp_path, path, data, line):
    wheel = built / "rlhf_host-0.10.0-py3-none-any.whl"
    files = scripts("archives").read(wheel)
    files = {name: text for name, text in files.items() if name != path} | ({path: data} if data is not None else {})
    with zipfile.ZipFile(tmp_path / wheel.name, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    others = [file for file in built.iterdir() if file.name != wheel.name]
    found = [*scripts("archives").problems([tmp_path / wheel.name, *others], NAMES, Version("0.10.0"))]
    assert f"{wheel.name}: {line}" in found


@pytest.mark.parametrize(
    ("path", "line"),
    [("LICENSE", "it has no LICENSE"), ("tests/test_one.py", "it has no tests"), ("PKG-INFO", "it has no PKG-INFO")],
)
def test_what_a_source_distribution_lacks_is_named(built, scripts, tmp_path, path, line):
    sdist = built / "rlhf_plugin_one-0.10.0.tar.gz"
    with tarfile.open(tmp_path / sdist.name, "w:gz") as archive:
        for name, data in scripts("archives").read(sdist).items():
            if name != path:
                member = tarfile.TarInfo(f"rlhf_plugin_one-0.10.0/{name}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    others = [file for file in built.iterdir() if file.name != sdist.name]
    assert [*scripts("archives").problems([tmp_path / sdist.name, *others], NAMES, Version("0.10.0"))] == [
        f"{sdist.name}: {line}"
    ]


def test_missing_and_foreign_files_are_named(built, scripts, tmp_path):
    files = [file for file in built.iterdir() if file.name != "rlhf_host-0.10.0.tar.gz"]
    problems = [*scripts("archives").problems([*files, tmp_path / "wheels.txt"], NAMES, Version("0.10.0"))]
    assert problems == ["rlhf_host-0.10.0.tar.gz is missing", "wheels.txt does not belong here"]


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("License-Expression: Apache-2.0", "License-Expression: MIT", "License-Expression is 'MIT', not 'Apache-2.0'"),
        ("Project-URL: Issues,", "Project-URL: Bugs,", "its metadata has no URL Issues"),
        ("rlhf-host<0.11,>=0.10", "rlhf-host<0.10", "it requires rlhf-host<0.10, which is not released with it"),
        ("rlhf-host<0.11,>=0.10", "rlhf-other", "it requires rlhf-other, which is not released with it"),
        ("# One", "See [the guide](docs/guide.md).", "its README links to docs/guide.md, which an index does not have"),
    ],
)
def test_what_metadata_lacks_is_named(built, scripts, old, new, line):
    files = scripts("archives").read(built / "rlhf_plugin_one-0.10.0-py3-none-any.whl")
    path = "rlhf_plugin_one-0.10.0.dist-info/METADATA"
    assert old in files[path].decode()
    files[path] = files[path].decode().replace(old, new).encode()
    assert [*scripts("archives").of_wheel(files, {*NAMES}, Version("0.10.0"))] == [line]
