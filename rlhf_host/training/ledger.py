"""What became of every draw of a task."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from rlhf_host.directories import write_file
from rlhf_host.errors import RunError

log = logging.getLogger(__name__)

FILE = "ledger.jsonl"


class Ledger:
    """``ledger.jsonl``: a line per step with its draws, as ``[source, index, outcome]``. Draws are numbered in the order of the
    stream, and a step has those after the step before, so each draw is in one line.
    """

    def __init__(self, run_dir: Path):
        self.path, self.drawn = run_dir / FILE, 0

    def note(self, step: int, version: int, draws: Sequence[tuple[str, int, str]]) -> None:
        """
        Args:
            version: of the weights that the step began with.
        """
        line = {"step": step, "version": version, "first": self.drawn, "draws": draws}
        with self.path.open("a") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self.drawn += len(draws)

    def check(self, drawn: int) -> None:
        """Raises ``RunError`` unless the stream has given as many."""
        if self.drawn != drawn:
            raise RunError(f"{self.path} has {self.drawn} draws, and the data's order {drawn}: this is a defect of the host")

    def go_back(self, step: int, drawn: int) -> None:
        """Take away the lines after a step, up to which there were ``drawn`` draws."""
        self.drawn = drawn
        if not self.path.exists() and not drawn:
            return
        lines = self.path.read_text("utf-8").splitlines(keepends=True) if self.path.exists() else []
        kept, found = [], 0
        try:
            for line in lines:
                row = json.loads(line)
                if row["step"] > step:
                    break
                found = found + len(row["draws"]) if row["first"] == found else -1
                kept.append(line)
        except (ValueError, TypeError, KeyError):
            found = -1
        if found != drawn:
            log.warning("%s does not have every draw up to step %d: it was changed, or is of an older version", self.path, step)
        write_file(self.path, "".join(kept).encode())
