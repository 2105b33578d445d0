"""The worker process: reads a request a line from stdin, answers a line on stdout, and ends with its stdin.

Run as a script by ``pool``, so that it imports math-verify and nothing of the run it serves.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import select
import signal
import sys
from functools import lru_cache
from typing import Any

ORPHAN_CHECK_S = 5.0
ALARM_GRACE_S = 1.0
_PLAIN_NAMES = re.compile(r"(?<![\\A-Za-z])(pi|theta|infinity|infty)(?![A-Za-z])")
_SYMBOLS = str.maketrans(
    {"−": "-", "×": r"\times ", "÷": "/", "·": r"\cdot ", "π": r"\pi ", "θ": r"\theta ", "∞": r"\infty ", "√": r"\sqrt "}
    | {
        "≤": r"\le ",
        "≥": r"\ge ",
        "≠": r"\ne ",
        "∪": r"\cup ",
        "∩": r"\cap ",
        "∈": r"\in ",
        "°": r"^\circ ",
        "²": "^2",
        "³": "^3",
    }
)


def prepare(text: str) -> str:
    """Plain ways of writing as LaTeX: ``**``, ``pi``, ``π``, ``≤``."""
    text = text.replace(r"\$", "").replace("$", "").replace("{,}", ",").replace("**", "^").translate(_SYMBOLS)
    return _PLAIN_NAMES.sub(lambda match: r"\infty " if match[1] == "infinity" else rf"\{match[1]} ", text)


def parse(text: str) -> list[Any]:
    """math-verify's reading of an answer: an expression and its text, or the text alone where it cannot be parsed."""
    from math_verify import LatexExtractionConfig
    from math_verify import parse as math_parse

    config = [LatexExtractionConfig(boxed_match_priority=0)]
    # Its own timeouts are alarms, which a computation in C ignores: the parent's deadline counts.
    return math_parse(rf"\boxed{{{prepare(text)}}}", config, parsing_timeout=None)


@lru_cache(maxsize=256)
def parse_label(text: str) -> list[Any]:
    """The label's reading; empty where it has none, or none that equals itself (0/0)."""
    from math_verify import verify
    from sympy import nan, zoo

    expressions = [item for item in parse(text) if not isinstance(item, str)]
    if not expressions or expressions[0] in (nan, zoo) or not verify(expressions, expressions, timeout_seconds=None):
        return []
    return expressions


def judge(label: str, answer: str, decimals: int) -> str:
    """``right``, ``wrong``, or ``label`` where the label cannot be parsed."""
    from math_verify import verify

    try:
        gold = parse_label(label)
    except Exception:
        gold = []
    if not gold:
        return "label"
    try:
        if "".join(label.split()) == "".join(answer.split()):
            return "right"
        return "right" if verify(gold, parse(answer), float_rounding=decimals, timeout_seconds=None) else "wrong"
    except Exception:  # RecursionError and MemoryError too: an answer too deep or too large to be one
        return "wrong"


def limit_memory(limit_mb: int) -> None:
    """At most so much address space, where the system knows such a limit; and no core dumps."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (limit_mb * 2**20, limit_mb * 2**20))


def memory_mb() -> float:
    """Address space in use, where the system tells; not ``ru_maxrss``, which on Linux a process inherits from its parent."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    except (OSError, ValueError):
        return 0.0


def read_line(stdin: Any, parent: int) -> bytes:
    """The next request. A fork of the parent may hold the pipe open after its death, so that is looked for as well."""
    while os.name == "posix" and not select.select([stdin], [], [], ORPHAN_CHECK_S)[0]:
        if os.getppid() != parent:
            return b""
    return stdin.readline()


def set_alarm(seconds: float) -> None:
    """With the default action the kernel ends the process, even in the middle of C code: no orphan outlives its request."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds)


def main() -> None:
    limit_mb, parent = int(sys.argv[1]), os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    with open(os.dup(0), "rb") as stdin, open(os.dup(1), "wb", buffering=0) as stdout:
        quiet = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):  # whatever a library prints must not end up in the answers
            os.dup2(quiet, descriptor)

        def send(reply: dict[str, Any]) -> None:
            stdout.write(json.dumps(reply).encode() + b"\n")

        try:
            limit_memory(limit_mb)
            logging.disable(logging.CRITICAL)
            judge("x^2+1", "1+x^2", 6)  # imports and caches: the first answer's deadline is not for them
        except BaseException as error:
            send({"error": f"{type(error).__name__}: {error}"})
            return
        send({"ready": True})
        while line := read_line(stdin, parent):
            request = json.loads(line)
            set_alarm(request["timeout_s"] + ALARM_GRACE_S)
            verdict = judge(request["label"], request["answer"], request["decimals"])
            set_alarm(0)
            # Caches grow. Half of the memory is always there for the next answer, so that running out is that answer's doing.
            retire = memory_mb() > limit_mb / 2
            send({"verdict": verdict, "retire": retire})
            if retire:
                return


if __name__ == "__main__":
    main()
