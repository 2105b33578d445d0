"""Pieces with everything that a GPU machine without a package index lacks, small enough to be sent: fetched, cut, packed, split.

    python scripts/gpu_carry/carry.py OUT [--piece-mib 52] [--without vllm]      # minutes; needs pip, tar and xz
    python scripts/gpu_carry/join.py OUT/pieces TARGET                           # there

``packages.toml`` says what is carried, and what is left out of it. A step that has its result in ``OUT`` already is not repeated:
remove its folder (``wheels``, ``own``, ``site``, ``pieces``) for another one. Each step prints its seconds and its bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import shutil
import subprocess
import sys
import time
import tomllib
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))
from fatbin import cut  # noqa: E402
from join import SUMS  # noqa: E402

GLIBC = (5, 12, 17, 24, 26, 27, 28, 31, 34, 35, 39)
"""Minor versions of glibc that wheels are tagged with: pip takes each by its own name."""
MIB = 1 << 20
LEAST_MIB = 1.0
PRESET = 1
"""Of xz: 3 takes twice as long for a hundredth less."""


class CarryError(Exception):
    """What tar, xz or pip could not do."""


def fetch(settings: Mapping[str, Any], wheels: Path, groups: Sequence[str]) -> None:
    """Downloads the wheels of the groups, without what they depend on."""
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in GLIBC] + [
        "manylinux2014_x86_64",
        "manylinux1_x86_64",
        "linux_x86_64",
    ]
    tags = [word for platform in platforms for word in ("--platform", platform)]
    where = ["--only-binary=:all:", "--python-version", settings["python"], "--implementation", "cp", *tags]
    _pip("download", *where, "--dest", str(wheels), *(name for group in groups for name in settings["wheels"][group]))


def build(settings: Mapping[str, Any], wheels: Path) -> None:
    """Builds the wheels of the repository."""
    projects = [path for pattern in settings["projects"] for path in sorted(ROOT.glob(pattern)) if path.is_dir()]
    _pip("wheel", "--no-build-isolation", "--wheel-dir", str(wheels), *map(str, [ROOT, *projects]))


def unpack(settings: Mapping[str, Any], wheels: Sequence[Path], site: Path) -> None:
    """Unpacks the wheels into one folder and takes out what is not used there."""
    for wheel in wheels:
        try:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site)
        except (zipfile.BadZipFile, zlib.error) as error:
            raise CarryError(f"{wheel} is damaged ({error}): remove {wheel.parent}, so that it is made again") from error
    for pattern in settings["cut"]["remove"]:
        for path in list(site.glob(pattern)):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    for pattern in settings["cut"]["libraries"]:
        for path in sorted(site.glob(pattern)):
            try:
                print(f"  {path.name}: {cut(path, settings['architecture'])}", file=sys.stderr)
            except ValueError as error:
                raise CarryError(f"{path.name}: {error}") from error


def pack(site: Path, pieces: Path, piece_bytes: int) -> None:
    """Packs a folder into pieces of at most ``piece_bytes`` each, and their checksums. The same folder gives the same bytes."""
    names = ["--sort=name", "--mtime=@0", "--owner=0", "--group=0", "--numeric-owner"]
    tar = subprocess.Popen(["tar", "-C", str(site), *names, "-cf", "-", "."], stdout=subprocess.PIPE)
    xz = subprocess.Popen(["xz", "-T2", f"--lzma2=preset={PRESET},dict=64MiB"], stdin=tar.stdout, stdout=subprocess.PIPE)
    assert tar.stdout is not None
    assert xz.stdout is not None
    tar.stdout.close()
    lines = []
    while first := xz.stdout.read(min(MIB, piece_bytes)):
        path, size, digest = pieces / f"piece-{len(lines):02}", 0, hashlib.sha256()
        with path.open("wb") as file:
            block = first
            while block:
                file.write(block)
                digest.update(block)
                size += len(block)
                block = xz.stdout.read(min(MIB, piece_bytes - size))
        lines.append(f"{digest.hexdigest()} {size} {path.name}\n")
    if tar.wait() or xz.wait():
        raise CarryError(f"cannot pack {site}: tar ended with {tar.returncode}, xz with {xz.returncode}")
    (pieces / SUMS).write_text("".join(lines))


def _pip(command: str, *arguments: str) -> None:
    program = [sys.executable, "-m", "pip", "--disable-pip-version-check", command, "--quiet", "--no-deps"]
    if subprocess.run([*program, *arguments], stdout=sys.stderr).returncode:
        raise CarryError(f"pip {command} failed, see above")


@contextmanager
def _whole(target: Path) -> Iterator[Path]:
    """Yields a folder that becomes ``target`` if nothing goes wrong."""
    unfinished = target.with_name(f"{target.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        unfinished.rename(target)
    except BaseException:  # Ctrl-C too
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _step(name: str, target: Path, work: Callable[[Path], None]) -> None:
    begun = time.perf_counter()
    if done := target.exists():
        print(f"{name}: {target} is there already", file=sys.stderr)
    else:
        with _whole(target) as folder:
            work(folder)
    files = [path for path in target.rglob("*") if path.is_file()]
    took = "" if done else f" in {time.perf_counter() - begun:.1f} s"
    print(f"{name}: {len(files)} files, {sum(path.stat().st_size for path in files):,} bytes{took}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--piece-mib", type=float, default=52, help="most that one piece may have, in MiB")
    parser.add_argument("--without", action="append", default=[], metavar="GROUP", help="leave out a group of packages.toml")
    options = parser.parse_args()
    settings = tomllib.loads((HERE / "packages.toml").read_text(encoding="utf-8"))
    groups = [group for group in settings["wheels"] if group not in options.without]
    if unknown := set(options.without) - settings["wheels"].keys():
        parser.error(f"--without {unknown.pop()}: the groups are {', '.join(settings['wheels'])}")
    if not LEAST_MIB <= options.piece_mib < math.inf:
        parser.error(f"--piece-mib {options.piece_mib:g}: should be a number of at least {LEAST_MIB:g}")
    if lacking := [program for program in ("tar", "xz") if shutil.which(program) is None]:
        parser.error(f"{' and '.join(lacking)} not found: install it")
    try:
        _carry(settings, groups, options.out, int(options.piece_mib * MIB))
    except (CarryError, OSError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _carry(settings: Mapping[str, Any], groups: Sequence[str], out: Path, piece_bytes: int) -> None:
    wheels, own, site, pieces = (out / name for name in ("wheels", "own", "site", "pieces"))
    _step("fetched", wheels, lambda folder: fetch(settings, folder, groups))
    _step("built", own, lambda folder: build(settings, folder))
    _step(
        "unpacked and cut", site, lambda folder: unpack(settings, sorted([*wheels.glob("*.whl"), *own.glob("*.whl")]), folder)
    )
    _step("packed", pieces, lambda folder: pack(site, folder, piece_bytes))
    for piece in sorted(pieces.glob("piece-*")):
        print(f"  {piece.name}: {piece.stat().st_size:,} bytes")


if __name__ == "__main__":
    os.umask(0o022)
    main()
