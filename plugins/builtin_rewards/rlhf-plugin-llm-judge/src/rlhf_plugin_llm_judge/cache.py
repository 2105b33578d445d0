"""Answers that are known: in memory, and in a file that a resumed run reads again."""

from __future__ import annotations

import json
import logging
import os
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import IO

log = logging.getLogger(__name__)


class KnownAnswers:
    """What models said, by the hash of what they were asked; the oldest go first.

    The file has a line for each. Several runs may append to it: what they write anew at the same time is lost to the others, and
    asked again.

    Args:
        size: bytes, in memory as on the disk; 0: nothing is kept.
    """

    def __init__(self, size: int):
        self.size, self.used = size, 0
        self._known: OrderedDict[str, tuple[str, bool]] = OrderedDict()
        self._path: Path | None = None
        self._file: IO[bytes] | None = None
        self._written = 0

    def open(self, path: Path) -> None:
        """Reads the file if there is one, and appends to it from now on. A file that cannot be read or written is told of and
        left alone.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = path.read_bytes().splitlines() if path.exists() else []
            for line in lines:
                with suppress(ValueError, TypeError):  # a line that a killed run left half written
                    digest, said, cut = json.loads(line)
                    self._keep(str(digest), str(said), bool(cut))
            self._path = path
            self._write_anew()
        except OSError as error:
            self._path = self._file = None
            log.warning("answers are kept in memory alone: %s: %s", path, error.strerror)

    def get(self, digest: str) -> tuple[str, bool] | None:
        if (known := self._known.get(digest)) is not None:
            self._known.move_to_end(digest)
        return known

    def put(self, digest: str, said: str, cut: bool) -> None:
        self._keep(digest, said, cut)
        if self._file is None:
            return
        try:
            self._written += self._file.write(_line(digest, said, cut))
            if self._written > 2 * self.size:
                self._write_anew()
        except OSError as error:
            self._file = None
            log.warning("answers are kept in memory alone from now on: %s: %s", self._path, error.strerror)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _keep(self, digest: str, said: str, cut: bool) -> None:
        if len(said) > self.size:
            return
        if (old := self._known.pop(digest, None)) is not None:
            self.used -= _bytes(digest, old[0])
        self._known[digest] = said, cut
        self.used += _bytes(digest, said)
        while self.used > self.size:
            gone, (text, _) = self._known.popitem(last=False)
            self.used -= _bytes(gone, text)

    def _write_anew(self) -> None:
        """Writes the file with what is known, and nothing else."""
        assert self._path is not None
        self.close()
        aside = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        with aside.open("wb") as file:
            self._written = sum(file.write(_line(digest, *known)) for digest, known in self._known.items())
        aside.replace(self._path)
        self._file = self._path.open("ab", buffering=0)


def _line(digest: str, said: str, cut: bool) -> bytes:
    return json.dumps([digest, said, cut]).encode() + b"\n"


def _bytes(digest: str, said: str) -> int:
    return len(digest) + len(said.encode(errors="surrogatepass"))
