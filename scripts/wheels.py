"""Builds the host and all plugins into ``dist``, and ``dist/wheels.txt``, which holds pip to them.

    python scripts/wheels.py [DIR]
    pip install -c DIR/wheels.txt rlhf-plugin-rloo

The names are not registered on a package index, so anybody could put a newer ``rlhf-plugin-rloo`` there, which ``pip install
--find-links`` would take. These wheels have a local version, 0.10.0+local, which no public index accepts, and ``wheels.txt``
constrains pip to it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.version import Version
from versions import Refused, copy_of, projects, set_version, version_of

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = "wheels.txt"
HEADER = "# Of scripts/wheels.py: pip install -c {folder}/wheels.txt NAME takes NAME, and what it needs of ours, from here.\n"


def local(version: Version) -> Version:
    return Version(f"{version.public}+local")


def build(root: Path, out: Path) -> list[Path]:
    """Builds wheels of all distributions, in place of those of the project that ``out`` has."""
    out.mkdir(parents=True, exist_ok=True)
    for old in [*out.glob("rlhf_*.whl"), out / CONSTRAINTS]:
        old.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_of(root, Path(folder))
        version = local(version_of(copy))
        set_version(copy, version)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet"]
        flags = ["--no-deps", "--no-build-isolation", "--wheel-dir", str(out.resolve())]
        if subprocess.run([*pip, *flags, *map(str, projects(copy))], check=False).returncode:
            raise Refused("pip could not build the wheels; its messages are above")
    return hold(out, version)


def hold(out: Path, version: Version) -> list[Path]:
    """Writes ``wheels.txt`` for the wheels in a folder, and returns them."""
    wheels = sorted(out.glob("rlhf_*.whl"))
    names = [wheel.name.partition("-")[0].replace("_", "-") for wheel in wheels]
    text = HEADER.format(folder=out) + "--find-links .\n" + "".join(f"{name}=={version}\n" for name in names)
    (out / CONSTRAINTS).write_text(text, encoding="utf-8")
    return wheels


def main() -> None:
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "dist")
    try:
        wheels = build(ROOT, out)
    except Refused as error:
        sys.exit(f"Error: {error}")
    print(f"{len(wheels)} wheels are in {out}: pip install -c {out / CONSTRAINTS} NAME")


if __name__ == "__main__":
    main()
