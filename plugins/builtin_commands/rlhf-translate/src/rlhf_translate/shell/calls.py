"""What is found in a script: commands as they would run, and what else they depend on."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlhf_translate.shell.word import Word


@dataclass
class Call:
    """One command as it would run."""

    words: list[Word]
    """With assignments before it."""
    passes_on: int = 0
    """The line of ``$@``: it also has what the script is called with."""

    @property
    def line(self) -> int:
        return self.words[0].line


@dataclass
class Script:
    """What a script says."""

    calls: list[Call] = field(default_factory=list)
    left_out: list[Call] = field(default_factory=list)
    """Of branches that do not run."""
    directives: list[Word] = field(default_factory=list)
    """Of Slurm, ``#SBATCH``."""
    given: set[str] = field(default_factory=set)
    """Variables whose values the reader gave."""
    read: list[Word] = field(default_factory=list)
    """Other scripts that it runs in its own place."""
    unread: list[Word] = field(default_factory=list)
    """Those that are not here, whose variables are not known."""
