"""Notes that people give to runs: a file in the run directory."""

from __future__ import annotations

from rlhf_host import RunDirectory
from rlhf_host.commands import write_file

NOTE = "note.txt"


def note_of(run: RunDirectory) -> str:
    """Returns a run's note; empty where it has none."""
    path = run.path / NOTE
    return path.read_text("utf-8", "replace").strip() if path.is_file() else ""


def write_note(run: RunDirectory, text: str) -> None:
    """Writes a run's note; an empty one removes it."""
    if text.strip():
        write_file(run.path / NOTE, f"{text.strip()}\n".encode())
    else:
        (run.path / NOTE).unlink(missing_ok=True)
