"""Errors that a person can act on."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator


class UserError(Exception):
    """Bad input. The command line prints the message and leaves with exit code 2, without a traceback."""


class PluginError(UserError):
    """A plugin cannot be found, chosen, imported or configured."""


class RunError(Exception):
    """A run had to stop for a reason of its own (rewards failing, non-finite loss): exit code 1, no traceback."""


class LostError(RunError):
    """A process or machine of the run is gone, and what it held with it: the run can go on from its last checkpoint."""


@contextlib.contextmanager
def told_of(plugin: str, what: str) -> Iterator[None]:
    """What an engine or a backend raises in ``what`` becomes a ``RunError`` with its name; the project's own errors pass."""
    try:
        yield
    except (UserError, RunError):
        raise
    except Exception as error:
        raise RunError(f"{plugin} failed in {what}: {type(error).__name__}: {' '.join(str(error).split())}") from error


def near_matches(name: str, known: Iterable[str], count: int = 3) -> str:
    """``; did you mean 'a' or 'b'?``, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=count, cutoff=0.6)
    return "; did you mean " + " or ".join(repr(match) for match in close) + "?" if close else ""
