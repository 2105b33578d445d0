"""Checks of what a wheel and a source distribution of the project must have, and must not."""

from __future__ import annotations

import json
import re
import tarfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path, PurePosixPath

from packaging.requirements import Requirement
from packaging.version import Version

INDEX = "rlhf_host/plugins/index.json"
"""The list of what the project publishes, as the host has it."""
LARGEST_BYTES = 8 * 2**20
RUBBISH = re.compile(r"__pycache__|\.py[co]$|\.egg-info/|(^|/)\.(?!gitignore$)[^/]+|(^|/)(dist|runs|build)/[^/]+\.(whl|gz)$")
LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"")
URLS = ("Homepage", "Repository", "Documentation", "Issues", "Changelog")


def problems(files: Iterable[Path], names: Iterable[str], version: Version) -> Iterator[str]:
    """One line for each fault of the files, which must be a wheel and a source distribution of each name."""
    files, names = list(files), list(names)
    stems = [f"{name.replace('-', '_')}-{version}" for name in names]
    wanted = {f"{stem}{end}" for stem in stems for end in ("-py3-none-any.whl", ".tar.gz")}
    there = {file.name for file in files}
    yield from (f"{name} is missing" for name in sorted(wanted - there))
    yield from (f"{name} does not belong here" for name in sorted(there - wanted))
    for file in files:
        if file.name in wanted:
            wheel = file.suffix == ".whl"
            for problem in (of_wheel if wheel else of_sdist)(read(file), set(names), version):
                yield f"{file.name}: {problem}"


def read(file: Path) -> dict[str, bytes]:
    """Path inside → content; what is no plain file has ``b""``."""
    if file.suffix == ".whl":
        with zipfile.ZipFile(file) as archive:
            return {name: archive.read(name) for name in archive.namelist()}
    with tarfile.open(file) as archive:
        return {
            member.name.partition("/")[2]: archive.extractfile(member).read() if member.isfile() else b""  # type: ignore[union-attr]
            for member in archive
        }


def of_wheel(content: Mapping[str, bytes], names: set[str], version: Version) -> Iterator[str]:
    yield from of_any(content)
    (info,) = {PurePosixPath(path).parts[0] for path in content if ".dist-info/" in path}
    if b"Apache License" not in content.get(f"{info}/licenses/LICENSE", b""):
        yield "it has no LICENSE"
    about = HeaderParser().parsestr(content[f"{info}/METADATA"].decode())
    package = about["Name"].replace("-", "_")
    if f"{package}/py.typed" not in content:
        yield f"{package}/py.typed is missing"
    yield from (f"{path} is outside of {package}" for path in content if PurePosixPath(path).parts[0] not in (package, info))
    yield from (f"{path} is a test" for path in content if path.startswith((f"{package}/tests/", "tests/")))
    for entry in json.loads(content.get(INDEX, b'{"distributions": []}'))["distributions"]:
        if entry["version"] != str(version):
            yield f"{INDEX} has {entry['name']} {entry['version']}: python scripts/generate_docs.py"
    yield from of_metadata(about, names, version)


def of_sdist(content: Mapping[str, bytes], names: set[str], version: Version) -> Iterator[str]:
    yield from of_any(content)
    for name in ("LICENSE", "README.md", "pyproject.toml", "PKG-INFO"):
        if not content.get(name):
            yield f"it has no {name}"
    if not any(path.startswith(("src/", "rlhf_host/")) for path in content):
        yield "it has no source"
    if not any(path.startswith("tests/") for path in content):
        yield "it has no tests"


def of_any(content: Mapping[str, bytes]) -> Iterator[str]:
    for path, data in content.items():
        if RUBBISH.search(path) and "lugin_template/" not in path:
            yield f"{path} is left behind by a tool"
        if len(data) > LARGEST_BYTES:
            yield f"{path} has {len(data) / 2**20:.1f} MiB"


def of_metadata(about: Message, names: set[str], version: Version) -> Iterator[str]:
    fields = {key: about.get_all(key) or [] for key in ("Project-URL", "Classifier", "Requires-Dist", "License-File")}
    stated = {url.partition(",")[0] for url in fields["Project-URL"]}
    yield from (f"its metadata has no URL {name}" for name in URLS if name not in stated)
    carried = "".join(" AND MIT" for file in fields["License-File"] if file != "LICENSE")  # of others, beside their files
    for key, wanted in {
        "License-Expression": f"Apache-2.0{carried}",
        "Author": "rlhf-host contributors",
        "Version": str(version),
    }.items():
        if about[key] != wanted:
            yield f"{key} is {about[key]!r}, not {wanted!r}"
    for key in ("Summary", "Keywords", "Requires-Python"):
        if not about[key]:
            yield f"its metadata has no {key}"
    for requirement in map(Requirement, fields["Requires-Dist"]):
        if requirement.name.startswith("rlhf-") and (
            requirement.name not in names or not requirement.specifier.contains(version, prereleases=True)
        ):
            yield f"it requires {requirement}, which is not released with it"
    yield from (f"its README links to {link}, which an index does not have" for link in relative(about.get_payload()))


def relative(text: str) -> list[str]:
    """Links and pictures of a README that are not addresses: an index shows it without the files beside it."""
    links = (found[1] or found[2] for found in LINK.finditer(re.sub(r"`[^`\n]*`|```.*?```", "", text, flags=re.S)))
    return [link for link in links if not re.match(r"https?://|mailto:|#", link)]
