"""GPU code of other architectures, taken out of shared libraries in place: sections and offsets stay, so it is the same library.

    python scripts/gpu_carry/fatbin.py --keep 90 [--dry] LIB.so [LIB.so ...]

A fat binary is a header and entries; each entry is machine code (ELF) or PTX for one architecture. Entries that are kept move to
the front, the header's size leaves out the others, and their bytes become zeros, which compress to nothing. A fat binary without
code for the architecture keeps PTX that a driver can compile for it, or else its smallest entry: its kernels then fail when they
are called, as they would have before.
"""

from __future__ import annotations

import argparse
import mmap
import struct
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

MAGIC = struct.pack("<I", 0xBA55ED50)
HEADER = struct.Struct("<IHHQ")
"""Of a fat binary: magic, version, size of this header, size of what follows it."""
PTX, ELF = 1, 2


@dataclass(slots=True)
class Cut:
    """What was found in a library, and what of it was kept, in bytes."""

    binaries: int = 0
    whole: int = 0
    kept: int = 0
    entries: Counter[str] = field(default_factory=Counter)
    """Kind and architecture, such as ``elf 90`` → bytes."""

    def __str__(self) -> str:
        table = ", ".join(f"{name}: {size / 1e6:.1f}" for name, size in sorted(self.entries.items()))
        return f"{self.binaries} fat binaries of {self.whole / 1e6:.1f} MB ({table or 'none'}), kept {self.kept / 1e6:.1f} MB"


def cut(path: Path, architecture: int, *, dry: bool = False) -> Cut:
    """Leaves the code of one architecture in a library; ``dry``: only says what that would be.

    Raises:
        ValueError: an entry is not understood. Nothing of its fat binary was changed.
    """
    found = Cut()
    access = mmap.ACCESS_READ if dry else mmap.ACCESS_WRITE
    with path.open("rb" if dry else "r+b") as file, mmap.mmap(file.fileno(), 0, access=access) as data:
        at = data.find(MAGIC)
        while at >= 0:
            begin = at + HEADER.size
            known = begin <= len(data)
            version, header, size = HEADER.unpack_from(data, at)[1:] if known else (0, 0, 0)
            if (version, header) != (1, HEADER.size) or begin + size > len(data):
                at = data.find(MAGIC, at + len(MAGIC))  # these bytes happen to be elsewhere too
                continue
            entries = list(_entries(data, begin, begin + size))
            for kind, number, entry in entries:
                found.entries[f"{ {PTX: 'ptx', ELF: 'elf'}.get(kind, kind) } {number}"] += len(entry)
            kept = b"".join(_kept(entries, architecture))
            found.binaries, found.whole, found.kept = found.binaries + 1, found.whole + size, found.kept + len(kept)
            if not dry:
                data[at:begin] = HEADER.pack(0xBA55ED50, version, header, len(kept))
                data[begin : begin + size] = kept.ljust(size, b"\0")
            at = data.find(MAGIC, begin + size)
    return found


def _entries(data: mmap.mmap, start: int, end: int) -> Iterator[tuple[int, int, bytes]]:
    """Yields kind, architecture and bytes of each entry."""
    at = start
    while at < end:
        kind, _, header, size = HEADER_OF_ENTRY.unpack_from(data, at) if at + 64 <= end else (0, 0, 0, 0)
        if not 64 <= header <= 4096 or at + header + size > end:
            raise ValueError(f"the entry at byte {at:,} of a fat binary is not understood")
        yield kind, struct.unpack_from("<I", data, at + 28)[0], bytes(data[at : at + header + size])
        at += header + size


HEADER_OF_ENTRY = struct.Struct("<HHIQ")


def _kept(entries: list[tuple[int, int, bytes]], architecture: int) -> list[bytes]:
    """Returns machine code of the architecture; else the newest PTX that it can run; else the smallest entry."""
    code = [entry for kind, number, entry in entries if kind == ELF and number == architecture]
    older = [(number, entry) for kind, number, entry in entries if kind == PTX and number <= architecture]
    smallest = sorted((entry for _, _, entry in entries), key=len)[:1]
    return code or [entry for _, entry in sorted(older)[-1:]] or smallest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=int, default=90, help="the architecture: 90 is Hopper")
    parser.add_argument("--dry", action="store_true", help="change nothing")
    parser.add_argument("files", nargs="+", type=Path)
    options = parser.parse_args()
    for path in options.files:
        try:
            print(f"{path.name}: {cut(path, options.keep, dry=options.dry)}")
        except (OSError, ValueError) as error:
            print(f"{path}: {error}", file=sys.stderr)
            sys.exit(2)


if __name__ == "__main__":
    main()
