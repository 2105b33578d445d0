"""Makes a release of all distributions: one version everywhere, every wheel and source distribution, checked.

    python scripts/release.py 0.11.0 --dry-run   # all of it in a copy; the clone stays as it is
    python scripts/release.py 0.11.0             # raises the version, makes the changelog's section, builds, checks
    python scripts/release.py --tag v0.11.0      # builds and checks what the tag has: what .github/workflows/release.yml runs

It ends with what to type next: nothing is committed, tagged or uploaded. The files are in ``build/release``. While no package
index has the packages, install lines hold pip to ``dist/wheels.txt``; the first release takes that away.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import archives
from packaging.version import Version
from versions import CHANGELOG, Refused, copy_of, next_version, projects, raise_version, tracked, version_of

ROOT = Path(__file__).resolve().parents[1]
OUT = "build/release"
UNRELEASED = "## Unreleased\n"
HELD = re.compile(r"-c (?:\S+/)?dist/wheels\.txt ")
"""What ties an install line to the wheels of a clone."""
UNTIL = re.compile(r"^[ \t]*\{# until published #\}\n.*?^[ \t]*\{# /until published #\}\n", re.M | re.S)
"""What is in the template for plugins until a package index has the host."""
OPTIONS = '"-c dist/wheels.txt"  # until a package index has them'
ABOUT_WHEELS = ("Makefile", *(f"scripts/{name}.py" for name in ("release", "wheels")), "tests/packaging/test_held.py")
EARLIER = re.compile(
    r"\b(no|while|once|until) [^.]*\bindex\b|nothing is published|\bnot (yet )?(published|registered)|dist/wheels\.txt", re.I
)
"""What is said of the time before the first release."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", nargs="?", help="the version to release, such as 0.11.0")
    parser.add_argument("--dry-run", action="store_true", help="in a copy")
    parser.add_argument("--tag", help="build and check the version of this tag; change nothing")
    arguments = parser.parse_args()
    if bool(arguments.version) == bool(arguments.tag):
        parser.error("give a version, or --tag vVERSION")
    try:
        if arguments.tag:
            of_tag(ROOT, arguments.tag)
        elif arguments.dry_run:
            with tempfile.TemporaryDirectory() as folder:
                print(f"A copy of {ROOT}, in which everything is done:")
                release(as_clone(copy_of(ROOT, Path(folder))), arguments.version)
                print("That was a dry run: nothing here was changed.")
        else:
            refuse_changes(ROOT)
            release(ROOT, arguments.version)
    except Refused as error:
        sys.exit(f"Error: {error}")


def release(root: Path, text: str) -> None:
    version = next_version(text, root)
    print(f"1. From {version_of(root)} to {version}")
    add_section(root / CHANGELOG, version)
    changed = raise_version(root, version)
    print(f"   version: {len(changed)} files")
    freed = publish_names(root)
    print(f"   install lines without dist/wheels.txt: {len(freed)} files")
    generate(root)
    print("   generated pages and rlhf_host/plugins/index.json: python scripts/generate_docs.py")
    for line in spoken_before(root):
        print(f"   read this again, it was written before a release: {line}")
    build_and_check(root, version)
    print("4. Next:")
    print(f"   git switch -c release-{version} && git commit --all --message 'Version {version}'")
    print("   push it, open a pull request, and wait for the tests; once it is merged, on main:")
    print(f"   git tag --annotate v{version} --message 'Version {version}' && git push origin v{version}")
    print(
        "   .github/workflows/release.yml then builds and checks the same again, and publishes it when its environment is approved."
    )


def generate(root: Path) -> None:
    """Writes the generated pages, in an environment where the distributions have the version that they now have."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "install",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
        ]
        run(root, [*pip, "--no-compile", "--target", folder, *map(str, projects(root))])
        run(root, [sys.executable, "scripts/generate_docs.py"], folder)


def of_tag(root: Path, tag: str) -> None:
    version = version_of(root)
    if tag != f"v{version}":
        raise Refused(f"the tag is {tag!r}, and the version {version}: a tag is v and the version")
    if f"## {version} (" not in (root / CHANGELOG).read_text(encoding="utf-8"):
        raise Refused(f"{CHANGELOG} has no section of {version}: python scripts/release.py {version}")
    if held := [name for name, text in texts(root) if freed(text) != text]:
        raise Refused(f"install lines are held to a clone's wheels in {held[0]}: python scripts/release.py {version}")
    build_and_check(root, version)


def build_and_check(root: Path, version: Version) -> None:
    out = root / OUT
    out.mkdir(parents=True, exist_ok=True)
    for old in out.iterdir():
        old.unlink()
    every = projects(root)
    print(f"2. Builds {len(every)} distributions")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(lambda project: build(root, project, out), every):
            pass
    files = sorted(out.iterdir())
    print(f"   {OUT}: {len(files)} files, {sum(file.stat().st_size for file in files) / 2**20:.1f} MiB")
    print("3. Checks them")
    names = ["rlhf-host", *(project.name for project in every[1:])]
    if problems := [*archives.problems(files, names, version)]:
        raise Refused(f"{len(problems)} problems:\n" + "\n".join(problems))
    print("   contents, licences, metadata, links, and what they require of each other: fine")
    print(f"   twine check --strict: {twine(root, files)} passed")


def twine(root: Path, files: Sequence[Path]) -> int:
    """How many files an index can show."""
    return run(root, [sys.executable, "-m", "twine", "check", "--strict", *map(str, files)]).count("PASSED")


def build(root: Path, project: Path, out: Path) -> None:
    """Builds the source distribution, and the wheel from it."""
    run(root, [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(project)])


def add_section(changelog: Path, version: Version) -> None:
    """Makes what is unreleased the section of the version."""
    text = changelog.read_text(encoding="utf-8")
    head, found, body = text.partition(UNRELEASED)
    if not found or not body.partition("\n## ")[0].strip():
        raise Refused(f"{changelog}: nothing is below {UNRELEASED.strip()!r}, so there is nothing to release")
    day = datetime.datetime.now(datetime.UTC).date()
    changelog.write_text(f"{head}{UNRELEASED}\n## {version} ({day})\n{body}", encoding="utf-8")


def publish_names(root: Path) -> list[str]:
    """Frees install lines from the wheels of a clone, since the names will be on the index."""
    changed = []
    for name, text in texts(root):
        if (free := freed(text)) != text:
            (root / name).write_text(free, encoding="utf-8")
            changed.append(name)
    return changed


def freed(text: str) -> str:
    return HELD.sub("", UNTIL.sub("", text)).replace(OPTIONS, "None")


def spoken_before(root: Path) -> Iterator[str]:
    for name, text in texts(root):
        for number, line in enumerate(text.splitlines(), 1):
            if name.endswith((".md", ".jinja", ".ipynb")) and name != CHANGELOG and EARLIER.search(line):
                yield f"{name}:{number}"


def texts(root: Path) -> Iterator[tuple[str, str]]:
    for name in tracked(root):
        if name not in ABOUT_WHEELS and (root / name).is_file():
            try:
                yield name, (root / name).read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue


def as_clone(root: Path) -> Path:
    run(root, ["git", "init", "--quiet"])
    run(root, ["git", "add", "--all"])
    return root


def refuse_changes(root: Path) -> None:
    if changes := run(root, ["git", "status", "--porcelain"]).splitlines():
        raise Refused(
            f"{len(changes)} files are changed and not committed, such as {changes[0][3:]}: commit or stash them first"
        )


def run(root: Path, command: list[str], *packages: str) -> str:
    """Runs a command in the clone, whose own code it imports. Raises ``Refused`` with its output where it fails."""
    path = os.pathsep.join(filter(None, [str(root), *packages, os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        command, cwd=root, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        shown = " ".join(command[:5]) + (" ..." if len(command) > 5 else "")
        raise Refused(f"{shown} failed with {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
