"""The pieces of ``carry.py``, checked, joined and unpacked into a folder for ``PYTHONPATH``: needs Python alone, no pip.

    python scripts/gpu_carry/join.py PIECES [PIECES ...] TARGET

Pieces may have come in several folders, by several calls; ``SUMS`` is in at least one of them. ``TARGET`` appears whole or not at
all.
"""

from __future__ import annotations

import hashlib
import lzma
import re
import shlex
import shutil
import sys
import tarfile
import time
from collections.abc import Sequence
from io import RawIOBase
from pathlib import Path
from typing import Any

SUMS = "SUMS"
"""A line for each piece, in order: its SHA-256, its bytes, its name."""
LINE = re.compile(r"^([0-9a-f]{64}) ([0-9]+) (piece-[0-9]+)\n", re.MULTILINE)


class JoinError(Exception):
    """What is wrong with the pieces or the target."""


def join(folders: Sequence[Path], target: Path) -> tuple[int, int]:
    """Unpacks the pieces in ``folders``; returns bytes packed and unpacked.

    Raises:
        JoinError: a piece is missing or not what it was, or there is a target already.
    """
    if target.exists():
        raise JoinError(f"{target} exists: remove it, or name another folder")
    try:
        pieces = _checked(folders)
    except OSError as error:
        raise JoinError(f"cannot read the pieces: {error}") from error
    unfinished = target.with_name(f"{target.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        with lzma.open(Joined(pieces)) as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
            tar.extractall(unfinished, filter="data")
        unfinished.rename(target)
    except BaseException as error:  # Ctrl-C too
        shutil.rmtree(unfinished, ignore_errors=True)
        if not isinstance(error, lzma.LZMAError | tarfile.TarError | OSError | EOFError):
            raise
        raise JoinError(f"cannot unpack into {target}: {error}") from error
    unpacked = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    return sum(piece.stat().st_size for piece in pieces), unpacked


def _checked(folders: Sequence[Path]) -> list[Path]:
    """Returns the pieces in order."""
    lists = [folder / SUMS for folder in folders if (folder / SUMS).is_file()]
    if not lists:
        raise JoinError(f"no {SUMS} in {', '.join(map(str, folders))}: it comes with the pieces")
    if len({path.read_bytes() for path in lists}) > 1:
        raise JoinError(f"{lists[0]} and {lists[1]} differ: the pieces are of two packings")
    text = lists[0].read_bytes().decode(errors="replace")
    listed = LINE.findall(text)
    if not listed or "".join("{} {} {}\n".format(*piece) for piece in listed) != text:
        raise JoinError(f"{lists[0]} is not a list of pieces: carry it again")
    pieces = []
    for wanted, size, name in listed:
        found = [folder / name for folder in folders if (folder / name).is_file()]
        if not found:
            raise JoinError(f"{name} of {int(size):,} bytes is missing: carry it too")
        if found[0].stat().st_size != int(size):
            raise JoinError(f"{found[0]} has {found[0].stat().st_size:,} bytes in place of {int(size):,}: carry it again")
        with found[0].open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != wanted:
                raise JoinError(f"{found[0]} is not what was packed (its SHA-256 differs): carry it again")
        pieces.append(found[0])
    return pieces


class Joined(RawIOBase):
    """Reads files one after the other, so that nothing is written twice."""

    def __init__(self, paths: Sequence[Path]):
        self._files = [path.open("rb") for path in paths]

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while self._files:
            if count := self._files[0].readinto(buffer):
                return count
            self._files.pop(0).close()
        return 0

    def close(self) -> None:
        for file in self._files:
            file.close()
        super().close()


def main() -> None:
    if {"-h", "--help"} & {*sys.argv[1:]}:
        print(__doc__)
        return
    if len(sys.argv) < 3 or sys.argv[1].startswith("-"):
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    *folders, target = map(Path, sys.argv[1:])
    begun = time.perf_counter()
    try:
        packed, unpacked = join(folders, target)
    except JoinError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    print(
        f"joined {packed / 1e6:.1f} MB, unpacked {unpacked / 1e6:.1f} MB in {time.perf_counter() - begun:.1f} s",
        file=sys.stderr,
    )
    print(f"export PYTHONPATH={shlex.quote(str(target.resolve()))} VLLM_USE_FLASHINFER_SAMPLER=0")


if __name__ == "__main__":
    main()
