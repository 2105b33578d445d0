"""Findings in a script: commands as they would run, and everything else they depend on."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlhf_translate.shell.word import Word


@dataclass
class Call:
    """One command as it would run."""

    words: list[Word]
    """Words, including assignments before the command."""
    passes_on: int = 0
    """Line of ``$@``: the command also gets the arguments of the script."""

    @property
    def line(self) -> int:
        return self.words[0].line


@dataclass
class Script:
    """Findings in a script."""

    calls: list[Call] = field(default_factory=list)
    left_out: list[Call] = field(default_factory=list)
    """Commands in branches that do not run."""
    directives: list[Word] = field(default_factory=list)
    """Directives of Slurm, ``#SBATCH``."""
    given: set[str] = field(default_factory=set)
    """Variables whose values the reader gave."""
    read: list[Word] = field(default_factory=list)
    """Other scripts that it runs in its own place."""
    unread: list[Word] = field(default_factory=list)
    """Scripts that are not here, so their variables are unknown."""
