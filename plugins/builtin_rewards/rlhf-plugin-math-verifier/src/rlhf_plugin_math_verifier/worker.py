"""The worker process: reads one request per line from stdin, answers with one line on stdout, and ends with its stdin."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import select
import signal
import sys
from typing import Any

ORPHAN_CHECK_S = 5.0


def judge(label: str, claim: dict[str, Any], decimals: int) -> str:
    """Returns ``right``, ``wrong``, ``unjudged``, or ``label`` if the label cannot be read."""
    from rlhf_plugin_math_verifier.algebra import SYMPY
    from rlhf_plugin_math_verifier.claims import Claim
    from rlhf_plugin_math_verifier.judging import judge as judge_with

    try:
        return judge_with(label, Claim(**claim | {"rivals": tuple(claim["rivals"])}), decimals, SYMPY)
    except Exception:  # RecursionError and MemoryError too: an answer too deep or too large to be one
        return "wrong"


def limit_memory(limit_mb: int) -> None:
    """Limits the address space, if the system has such a limit, and turns off core dumps."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (limit_mb * 2**20, limit_mb * 2**20))


def memory_mb() -> float:
    """Returns the address space in use, if the system tells; not ``ru_maxrss``, which on Linux a process inherits from its
    parent.
    """
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    except (OSError, ValueError):
        return 0.0


def read_line(stdin: Any, parent: int) -> bytes:
    """Returns the next request. Also checks for the parent's death, because a fork of the parent may keep the pipe open."""
    while os.name == "posix" and not select.select([stdin], [], [], ORPHAN_CHECK_S)[0]:
        if os.getppid() != parent:
            return b""
    return stdin.readline()


def limit_processor_time(seconds: float) -> None:
    """Limits processor time from now on; 0: no limit. Time of other processes does not count. The default action of the signal
    ends the process, even in the middle of C code.
    """
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


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
            judge(
                "x^2+1", {"text": "1+x^2", "rivals": ()}, 6
            )  # imports and caches: the first answer's deadline is not for them
            gc.collect()
            gc.freeze()  # SymPy's objects stay, and each full collection would look at them
        except BaseException as error:
            send({"error": f"{type(error).__name__}: {error}"})
            return
        send({"ready": True})
        while line := read_line(stdin, parent):
            request = json.loads(line)
            limit_processor_time(request["timeout_s"])
            verdict = judge(request["label"], request["claim"], request["decimals"])
            limit_processor_time(0)
            # Caches grow. Half of the memory is always there for the next answer, so that running out is that answer's doing.
            retire = memory_mb() > limit_mb / 2
            send({"verdict": verdict, "retire": retire})
            if retire:
                return


if __name__ == "__main__":
    main()
