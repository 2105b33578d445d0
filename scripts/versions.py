"""Where the version is written, and how it is raised: all distributions of the repository have one version."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from packaging.version import InvalidVersion, Version

HOST = "rlhf_host/__init__.py"
CITATION = "CITATION.cff"
CHANGELOG = "docs/changelog.md"
REPOSITORY = "https://github.com/rlhf-host/rlhf-host"


class Refused(Exception):
    """One line: what is wrong, where, and what to do."""


def projects(root: Path) -> list[Path]:
    """Folders of all distributions, the host's first."""
    return [root, *(path.parent for path in sorted(root.glob("plugins/*/*/pyproject.toml")))]


def version_of(root: Path) -> Version:
    """Returns the version of the host. Raises ``Refused`` where a distribution has another one."""
    version = Version(re.findall(r'^__version__ = "(.+)"$', (root / HOST).read_text(encoding="utf-8"), re.M)[0])
    for project in projects(root)[1:]:
        (own,) = re.findall(r'^version = "(.+)"$', (project / "pyproject.toml").read_text(encoding="utf-8"), re.M)
        if Version(own) != version:
            raise Refused(f"{project.name} has the version {own}, and rlhf-host {version}: all have one version")
    return version


def next_version(text: str, root: Path) -> Version:
    """Reads the version that is to come. Raises ``Refused`` if it is none, or not above the present one."""
    try:
        wanted, present = Version(text), version_of(root)
    except InvalidVersion as error:
        raise Refused(f"{text!r} is not a version such as 1.2.0") from error
    if wanted.local or len(wanted.release) != 3 or str(wanted) != text:
        raise Refused(f"{text!r} is not a version such as 1.2.0 or 1.2.0rc1")
    if wanted < present:
        raise Refused(f"{text} is below the present version, {present}")
    return wanted


def range_of(version: Version) -> str:
    """The versions of the host for which a plugin of this version is made: ``>=0.10,<0.11``, and ``>=1,<2`` from 1.0 on."""
    major, minor = version.major, version.minor
    return f">={major},<{major + 1}" if major else f">=0.{minor},<0.{minor + 1}"


def set_version(root: Path, version: Version) -> None:
    """Writes the version into every distribution."""
    _replace(root / HOST, r'^__version__ = ".+"$', f'__version__ = "{version}"')
    for project in projects(root)[1:]:
        _replace(project / "pyproject.toml", r'^version = ".+"$', f'version = "{version}"')


def raise_version(root: Path, version: Version) -> list[str]:
    """Writes the version, and the range of it, wherever they are; returns the files that were changed."""
    before, present = _texts(root), version_of(root)
    set_version(root, version)
    _replace(root / CITATION, r"^version: .+$", f"version: {version}")
    old, new = range_of(present), range_of(version)
    for file in before if old != new else ():
        text = (root / file).read_text(encoding="utf-8")
        for was, is_now in ((old, new), (_turned(old), _turned(new))):
            text = text.replace(was, is_now)
        (root / file).write_text(text, encoding="utf-8")
    return [file for file, text in _texts(root).items() if before[file] != text]


def _turned(versions: str) -> str:
    return ",".join(reversed(versions.split(",")))


def _replace(file: Path, pattern: str, line: str) -> None:
    text, number = re.subn(pattern, lambda _: line, file.read_text(encoding="utf-8"), flags=re.M)
    if number != 1:
        raise Refused(f"{file}: {number} lines in place of one match {pattern}")
    file.write_text(text, encoding="utf-8")


def _texts(root: Path) -> dict[str, str]:
    """Text of every file under version control but the changelog, which is history."""
    texts = {}
    for name in tracked(root):
        if name != CHANGELOG and (root / name).is_file():
            try:
                texts[name] = (root / name).read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue  # a picture
    return texts


def tracked(root: Path, *flags: str) -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z", *flags], cwd=root, capture_output=True, text=True, check=False)
    if listed.returncode:
        raise Refused(f"{root} is not a clone: {listed.stderr.strip()}")
    return [name for name in listed.stdout.split("\0") if name]


def copy_of(root: Path, folder: Path) -> Path:
    """Copies the clone's files as they are now, those that Git ignores left out."""
    for name in sources(root):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, folder / name)
    return folder


def sources(root: Path) -> Iterator[str]:
    return (name for name in tracked(root, "--cached", "--others", "--exclude-standard") if (root / name).is_file())
