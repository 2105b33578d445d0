"""Errors that a person can act on. Every error of the host can be made of its message alone, which is how pickle makes it again."""

from __future__ import annotations

import contextlib
import difflib
import os
import sysconfig
import threading
import traceback
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path


class UserError(Exception):
    """Bad input. The command line prints the message and exits with code 2, without a traceback."""


class PluginError(UserError):
    """A plugin cannot be found, chosen, imported or configured."""


class RunError(Exception):
    """The run had to stop for a reason inside it (rewards failing, non-finite loss): exit code 1, no traceback."""


class DivergedError(RunError):
    """The weights became unusable."""


class LostError(RunError):
    """A process or machine of the run is gone, with its data: the run can go on from its last checkpoint."""


def in_one_line(error: BaseException) -> str:
    """Return the error's type and message without its line breaks."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def place_of(error: BaseException) -> str:
    """Returns `` (reward.py:7)``: the last line of a user's or plugin's code that the error came through. Empty if it came through
    none.
    """
    paths, own = sysconfig.get_paths(), f"{Path(__file__).parent}{os.sep}"
    installed, standard = (paths["purelib"], paths["platlib"]), (paths["stdlib"], paths["platstdlib"])
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    host = max((place for place, (file, _) in enumerate(frames) if file.startswith(own)), default=-1)
    called, written = list[tuple[str, int]](), list[tuple[str, int]]()
    for file, line in frames[host + 1 :]:
        if file.startswith(installed):
            called += [] if Path(file).parent.name == "pluggy" else [(file, line)]
        elif not file.startswith(("<", *standard)):
            written.append((file, line))
    if not written and not called:
        return ""
    file, line = written[-1] if written else called[0]
    near = os.path.relpath(file)
    return f" ({file if near.startswith(os.pardir) else near}:{line})"


def beyond(value: float, limit: float) -> str:
    """Returns ``0.00012, more than 0.0001``: with two digits, or as many as it takes to tell the two apart."""
    texts = [f"{value:.{digits}g}" for digits in range(2, 18)]
    return f"{next((text for text in texts if not float(text) <= limit), texts[-1])}, more than {limit:g}"


def asks_to_stop(error: BaseException) -> bool:
    """Returns True if the exception is meant for whoever runs the code: an interrupt of the main thread, or the cancellation of
    the task that runs it.

    Everything else that a plugin raises is its failure, including ``sys.exit``, an interrupt elsewhere, and a ``CancelledError``
    where nobody cancels.
    """
    from asyncio import CancelledError, current_task  # most that import this module need no event loop

    if isinstance(error, KeyboardInterrupt):
        return threading.current_thread() is threading.main_thread()
    with contextlib.suppress(RuntimeError):  # there is no event loop
        return isinstance(error, CancelledError) and (task := current_task()) is not None and task.cancelling() > 0
    return False


def first_line(error: object) -> str:
    """Return the first line of an error that has content."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


@contextlib.contextmanager
def failing_as(kind: type[Exception], message: str, own: tuple[type[Exception], ...] = (UserError, RunError)) -> Iterator[None]:
    """Turns what a plugin's code raises into an error of this kind, which begins with the message. What asks to stop, and errors
    in ``own``, pass unchanged.
    """
    try:
        yield
    except own:
        raise
    except BaseException as error:
        if asks_to_stop(error) or isinstance(error, GeneratorExit):
            raise
        raise kind(f"{message}: {in_one_line(error)}") from error


def blaming(plugin: str, what: str) -> contextlib.AbstractContextManager[None]:
    """Turns what a plugin raises in ``what`` into a ``RunError`` with its name; the project's own errors pass unchanged."""
    return failing_as(RunError, f"{plugin} failed in {what}")


_INVISIBLE = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_SHORT = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}


def visible(text: str) -> str:
    r"""Returns the text on one line with every control, direction and other invisible character escaped (`` ``, ``\x1b``):
    neither a model nor a file must be able to move the reader's cursor.
    """
    return "".join(_escape(char) if unicodedata.category(char) in _INVISIBLE else char for char in text)


def _escape(char: str) -> str:
    code = ord(char)
    return _SHORT.get(char) or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}")


def closest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """Returns the names that are near, the nearest first."""
    return difflib.get_close_matches(name, list(dict.fromkeys(known)), n=count, cutoff=0.6)


def near_matches(name: str, known: Iterable[str], count: int = 3) -> str:
    """Returns ``; did you mean 'a' or 'b'?``, or an empty text."""
    close = closest(name, known, count)
    return "; did you mean " + " or ".join(repr(match) for match in close) + "?" if close else ""


def near_siblings(path: Path, pattern: str = "*") -> str:
    """Returns the same for a path that does not exist, of the names beside it."""
    return near_matches(path.name, sorted(each.name for each in path.parent.glob(pattern)))


def a(noun: str) -> str:
    """Returns the noun after its article."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"
