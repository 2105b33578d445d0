"""The outcome of every draw of a task."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_host.directories import Lines, write_file
from rlhf_host.errors import RunError

log = logging.getLogger(__name__)

FILE = "ledger.jsonl"


class Ledger:
    """``ledger.jsonl``: a line per step with its draws, as ``[number, source, index, outcome]``. Draws are numbered in the
    order of the stream, and each is in one line. If a step fails because it gets no batch, the last line is its own and has
    ``"failed": true``.
    """

    def __init__(self, run_dir: Path):
        self.path = run_dir / FILE
        self._lines = Lines(self.path)
        self.first = 0
        """First draw that is in no line."""
        self.passed: set[int] = set()
        """Later draws that are in a line."""

    def note(self, step: int, version: int, draws: Sequence[tuple[int, str, int, str]]) -> None:
        """Adds a step's draws. Raises ``RunError`` for a draw that an earlier line has.

        Args:
            version: version of the weights at the start of the step.
        """
        if not self._add(number for number, *_ in draws):
            raise RunError(f"step {step} has a draw that {self.path} has already: this is a defect of the host")
        self._lines.add(json.dumps({"step": step, "version": version, "draws": draws}).encode() + b"\n")

    def note_failed(self, step: int, version: int, draws: Sequence[tuple[int, str, int, str]]) -> None:
        """Adds the draws of a step that got no batch. They are in no batch: a resumed run removes the line and draws them
        again.
        """
        self._lines.add(json.dumps({"step": step, "version": version, "draws": draws, "failed": True}).encode() + b"\n")

    def flush(self) -> None:
        """Writes the lines. Raises ``RunError`` if they cannot be written."""
        try:
            self._lines.flush()
        except OSError as error:
            raise RunError(
                f"{self.path} cannot be written: {error.strerror}; make room, or give it the right to be written"
            ) from error

    def check(self, stream: Mapping[str, Any]) -> None:
        """Raises ``RunError`` unless the ledger has exactly the draws that the stream gave to batches."""
        if (self.first, self.passed) != _draws_of(stream):
            first, passed = _draws_of(stream)
            raise RunError(
                f"{self.path} has the first {self.first} draws and {len(self.passed)} later ones, and the data's order the first"
                f" {first} and {len(passed)} later ones: this is a defect of the host"
            )

    def go_back(self, step: int, stream: Mapping[str, Any]) -> None:
        """Removes the lines after a step, up to which the stream gave these draws to batches."""
        wanted = _draws_of(stream)
        if not self.path.exists() and wanted == (0, set()):
            return
        lines = self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else []
        if lines and not lines[-1].endswith(b"\n"):
            del lines[-1]  # the run was killed there
        kept, whole = [], True
        self.first, self.passed = 0, set()
        try:
            for line in lines:
                row = json.loads(line)
                if row["step"] > step:
                    break
                whole &= self._add(number for number, *_ in row["draws"])
                kept.append(line)
        except (ValueError, TypeError, KeyError):
            whole = False
        if not whole or (self.first, self.passed) != wanted:
            log.warning("%s does not have every draw up to step %d: it was changed", self.path, step)
        self.first, self.passed = wanted
        write_file(self.path, b"".join(kept))

    def _add(self, numbers: Iterable[int]) -> bool:
        """Adds the draws; returns True if all were new."""
        new = True
        for number in numbers:
            new &= number >= self.first and number not in self.passed
            self.passed.add(number)
        while self.first in self.passed:
            self.passed.remove(self.first)
            self.first += 1
        return new


def _draws_of(stream: Mapping[str, Any]) -> tuple[int, set[int]]:
    return stream.get("ordinal", 0), {*stream.get("passed", ())}
