"""Names the files of slow tests that a change reaches, those nearest to it first; then a seventh of the others, in turn by day.

python scripts/reached.py              # the change: all commits of the twelve hours before the newest
python scripts/reached.py BASE         # the change: what differs from this commit
python scripts/reached.py --why        # with the rule by which each file is reached
python scripts/reached.py --fast       # files of fast tests nearest to what is not committed, or to the newest commit

A changed file reaches (0) itself, as a test, and the tests in the folder of a shared file of tests; (1) the tests of its
package or of its room of the host; (2) those of packages that require its package; (3) tests that name one of the package's
plugins, the folder below ``distributed``, or the changed file; (4) for a change of the host, the tests of the rooms above it,
and the contract of every plugin. It asks for packages and rooms, not for lines: commands run in processes of their own, which
coverage does not see.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.tiers import slow_files  # noqa: E402

HOURS = 12
TURNS = 7
"""Days in which every slow file is reached once."""
RULES = ("changed", "its package or room", "a package that requires it", "names it", "above it", "its turn")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", nargs="?", help="a commit; default: the newest that is twelve hours older than HEAD")
    parser.add_argument("--why", action="store_true", help="print the rule behind each file")
    parser.add_argument("--fast", action="store_true", help="files of fast tests, by the rules 0 to 2")
    options = parser.parse_args()
    if options.fast:
        found = near()
    else:
        found = reached(changed_files(options.base or recent_base()), slow_files(ROOT))
    for file, distance in found:
        print(f"{file}  # {RULES[distance]}" if options.why else file)


def near() -> list[tuple[str, int]]:
    listed = [git("diff", "--name-only", "--no-renames", "HEAD"), git("ls-files", "--others", "--exclude-standard")]
    changed = "\n".join(filter(None, listed)).splitlines() or changed_files("HEAD~1")
    tests = [file for file in git("ls-files", "tests/*.py", "plugins/*.py").splitlines() if Path(file).name.startswith("test_")]
    return [row for row in reached(changed, [file for file in tests if (ROOT / file).exists()]) if row[1] <= 2]


def recent_base() -> str:
    """The newest commit that is ``HOURS`` older than HEAD; the empty tree where there is none."""
    newest = int(git("log", "-1", "--format=%ct"))
    before = git("rev-list", "-1", f"--before={newest - 3600 * HOURS}", "HEAD")
    return before or git("hash-object", "-t", "tree", "/dev/null")


def changed_files(base: str) -> list[str]:
    return git("diff", "--name-only", "--no-renames", base, "HEAD").splitlines()


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def reached(changed: Iterable[str], files: Iterable[str], day: int | None = None) -> list[tuple[str, int]]:
    """Files of tests and the number of the first rule that reaches each, in that order."""
    rules = {rule for file in changed for rule in rules_of(file)}
    files = sorted(files)
    found = {}
    for file in files:
        text = (ROOT / file).read_text(encoding="utf-8")
        distances = [row[0] for row in rules if re.match(row[1], file) and re.search(row[2], text)]
        if distances:
            found[file] = min(distances)
    day = datetime.date.today().toordinal() if day is None else day
    others = [file for file in files if file not in found]
    found |= {file: len(RULES) - 1 for file in others[day % TURNS :: TURNS]}
    begin = len(files) * (day % TURNS) // TURNS  # where not all fit, other files are first on other days
    return sorted(found.items(), key=lambda row: (row[1], (files.index(row[0]) - begin) % len(files)))


def rules_of(file: str) -> Iterator[tuple[int, str, str]]:
    """Distance, a pattern of paths of tests, and one of their text, empty for any."""
    name = re.escape(Path(file).name)
    folder = re.escape(str(Path(file).parent))
    if "/tests/" in f"/{file}":
        yield 0, re.escape(file) + "$", ""
        if not Path(file).name.startswith("test_"):
            yield 0, folder + "/", ""
        return
    package = re.match(r"plugins/[^/]+/([^/]+)/", file)
    if package:
        yield 1, re.escape(package[0]), ""
        for other in requiring(package[1]):
            yield 2, re.escape(other) + "/", ""
        if names := entry_points(ROOT / package[0] / "pyproject.toml"):
            yield 3, "tests/", rf"\b(?:{'|'.join(map(re.escape, names))})\b"
    elif file.startswith("rlhf_host/"):
        inside = file.removeprefix("rlhf_host/").split("/")[:-1]
        for depth in range(len(inside), 0, -1):
            yield 1, "tests/" + re.escape("/".join(inside[:depth])) + "/", ""
        for room in folders_above(inside[0] if inside else Path(file).stem):
            yield 4, rf"tests/{re.escape(room)}/", ""
        yield 4, rf"tests/(?!(?:{'|'.join(map(re.escape, folders()))})/)", ""  # of no room: commands, docs, packaging
        yield 4, r"plugins/.*/test_contract\.py$", ""
        if inside[:1] == ["distributed"]:  # runs in several processes are tested in all rooms: those name ray, deepspeed, ...
            yield 3, "", rf"\b{inside[-1]}\b"
    elif file.startswith("docs/"):
        yield 1, "tests/docs/", ""
    elif file.startswith("plugin_template/"):
        yield 1, "tests/template/", ""
    elif "/" not in file or file.startswith("constraints/"):
        yield 1, "tests/packaging/", ""
    yield 3, "", rf"\b{name}\b"


@cache
def requiring(distribution: str) -> list[str]:
    """Folders of packages whose requirements name the distribution."""
    pattern = re.compile(rf'"{re.escape(distribution)}\b(?!-)')
    projects = sorted(ROOT.glob("plugins/*/*/pyproject.toml"))
    return [str(path.parent.relative_to(ROOT)) for path in projects if pattern.search(path.read_text())]


@cache
def entry_points(project: Path) -> list[str]:
    """Names of the plugins that a package has."""
    if not project.exists():
        return []
    groups = tomllib.loads(project.read_text())["project"].get("entry-points", {})
    return sorted({name for plugins in groups.values() for name in plugins})


def folders() -> list[str]:
    """Rooms of the host that have tests of their own, the upper first, by the import rules."""
    return [name for floor in floors() for name in floor if (ROOT / "tests" / name).is_dir()]


def folders_above(room: str) -> list[str]:
    above = itertools.takewhile(lambda floor: room not in floor, floors())
    return [name for floor in above for name in floor if (ROOT / "tests" / name).is_dir()]


@cache
def floors() -> list[list[str]]:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    return [[name.strip().removeprefix("rlhf_host.") for name in layer.split("|")] for layer in layers]


if __name__ == "__main__":
    main()
