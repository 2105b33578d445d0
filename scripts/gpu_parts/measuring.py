"""Measures a part, here or in another process that ends when its time is over: what it has by then counts as partial."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import IO, Any, TypeAlias

import torch

from gpu_parts.machine import GB, Machine, Reading, Report, Skipped, held_bytes
from gpu_parts.table import Figure, Part

Result: TypeAlias = dict[str, Any]
"""The JSON object of a figure."""
END = "end"
"""Key of the line by which a process says that a part is over."""
LEFT_GB = 1.0
"""What a part may leave on the GPU; if it is more, the next part has a process of its own."""


def measure(part: Part, machine: Machine, emit: Callable[[Result], None]) -> None:
    """Emit a line for each reading; the last one of a figure counts."""
    started, readings = time.perf_counter(), dict[str, Reading]()
    figures = {figure.name: figure for figure in part.figures}
    device = "cpu, dry run" if machine.dry else torch.cuda.get_device_name()

    def line(name: str, **more: Any) -> Result:
        reading = readings.get(name)
        about = {"device": device, "seconds": round(time.perf_counter() - started, 1)}
        return judged(figures[name], machine.dry, reading) | about | more

    def take(reading: Reading) -> None:
        name = reading.figure or part.name
        if name not in figures:
            raise RuntimeError(f"part {part.name} has no figure {name}")
        readings[name] = reading
        emit(line(name))

    problem: Result = {"ok": False, "error": f"part {part.name} ended without this figure"}
    try:
        with contextlib.redirect_stdout(sys.stderr):
            part.measure(machine, Report(take))
    except Skipped as reason:
        problem = {"value": None, "ok": None, "skipped": str(reason)}
    except Exception as error:
        traceback.print_exc()
        problem = {"ok": False, "error": f"{type(error).__name__}: {error}"}
    for name in figures:
        if name not in readings or readings[name].partial:
            if "skipped" in problem:
                readings.pop(name, None)
            emit(line(name, **problem))


def judged(figure: Figure, dry: bool, reading: Reading | None) -> Result:
    result: Result = {"part": figure.name, "value": None, "limit": figure.limit, "ok": None}
    if reading is not None:
        result |= {"value": reading.value, "details": reading.details} | ({"partial": True} if reading.partial else {})
        result["ok"] = figure.met(reading.value) if figure.everywhere or not dry else None
    return result


def serve(parts: Sequence[Part], machine: Machine) -> None:
    """Measure the parts whose names come by stdin, and print their lines; what else is printed goes to stderr."""
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM's processes print too

    def emit(result: Result) -> None:
        print(json.dumps(result), file=lines, flush=True)

    by_name = {part.name: part for part in parts}
    for name in map(str.strip, sys.stdin):
        measure(by_name[name], machine, emit)
        gc.collect()
        torch.cuda.empty_cache()
        emit({END: name, "held_gb": held_bytes(machine) / GB})


class Apart:
    """A process for one part after the other.

    Args:
        command: starts ``serve``.
    """

    def __init__(self, command: Sequence[str]):
        self._command = command
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._kind = ""

    def is_there_for(self, part: Part) -> bool:
        """True if the part needs no new process."""
        return self._process is not None and self._kind == part.process != ""

    def measure(self, part: Part, machine: Machine, limit_s: float, emit: Callable[[Result], None]) -> None:
        """As ``measure``. When ``limit_s`` are over, the process is killed and the latest partial readings are taken."""
        deadline, latest = time.monotonic() + limit_s, dict[str, Result]()
        if not self.is_there_for(part):
            self.close()
            self._start(part)
        process = self._process
        assert process is not None
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(f"{part.name}\n")
            process.stdin.flush()
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                self.close(kill=True)
                emit_rest(part, latest, f"after {limit_s:g} s", cut=True, emit=emit)
                return
            if line is None:
                code = process.wait()
                self.close(kill=True)
                emit_rest(part, latest, f"its process ended with {code}", cut=False, emit=emit)
                return
            result = json.loads(line)
            if END in result:
                # An error of CUDA would be that of all parts that follow.
                if not part.process or result["held_gb"] > LEFT_GB or any("error" in each for each in latest.values()):
                    self.close()
                return
            latest[result["part"]] = result
            emit(result)

    def close(self, *, kill: bool = False) -> None:
        """End the process, and those that it has started."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        if not kill:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its engines and runs too
        process.wait()

    def _start(self, part: Part) -> None:
        self._kind, self._lines = part.process, queue.SimpleQueue()
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self._process.stdout is not None
        threading.Thread(target=_read, args=(self._process.stdout, self._lines), daemon=True).start()


def _read(stdout: IO[str], lines: queue.SimpleQueue[str | None]) -> None:
    for line in stdout:
        lines.put(line)
    lines.put(None)


def emit_rest(part: Part, latest: dict[str, Result], reason: str, *, cut: bool, emit: Callable[[Result], None]) -> None:
    """Emit the figures of a part that did not come to its end: the latest partial reading counts if it was cut by time."""
    for figure in part.figures:
        result = latest.get(figure.name)
        if result is None:
            empty = {"part": figure.name, "value": None, "limit": figure.limit, "ok": False}
            emit(empty | {"error": f"not done {reason}" if cut else f"{reason} and said nothing"})
        elif result.get("partial"):
            emit(result | ({"cut": reason} if cut else {"ok": False, "error": reason}))
