"""What is recorded in one process: spans of its work, torch's profiler, and the memory of a GPU.

``look``, ``begin`` and ``finish`` run in every process of a run, beside its weights. A process may be called several times: in a
run without Ray the trainer, the engine and the controller are one.
"""

from __future__ import annotations

import asyncio
import gzip
import os
import shutil
import socket
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from rlhf_host import UserError
from rlhf_host.internals import observers

MOST_SPANS = 200_000
"""Spans that a process keeps of one step; of more, the last."""
MOST_ALLOCATIONS = 200_000
"""Entries in the history of a GPU's memory."""
OPERATIONS = 100
"""Operations of which a process reports the time, the longest ones."""
OWN = "rlhf_profile."
"""Beginning of the names of functions that are called for this package: they are no work of the run."""


def identity() -> str:
    """Returns a text that no other process has at this time, also on other machines and in other containers."""
    return f"{_text('/proc/sys/kernel/random/boot_id') or socket.gethostname()}/{_link('/proc/self/ns/pid')}/{os.getpid()}"


def machine() -> str:
    """Returns a text that processes share if they read the same clock (``time.perf_counter_ns``)."""
    return f"{_text('/proc/sys/kernel/random/boot_id') or socket.gethostname()}/{_link('/proc/self/ns/time')}"


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def look(end: Any) -> dict[str, Any]:
    """Returns who this process is, and the time of its clock."""
    return {
        "identity": identity(),
        "machine": machine(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "now": time.perf_counter_ns(),
    }


class Span:
    """One stretch of work, as ``rlhf_host``'s observers see it."""

    def __init__(self, work: str):
        self.work, self.thread, self.number = work, threading.current_thread().name, threading.get_native_id()
        self.began = 0
        self._annotation: Any = None

    def __enter__(self) -> None:
        self.began = time.perf_counter_ns()
        _unfinished.add(self)
        recording = _recording
        if recording is not None:
            recording.entered(self)
            if recording.annotates and asyncio._get_running_loop() is None:  # where spans overlap, ranges would not nest
                import torch

                self._annotation = torch.profiler.record_function(self.work)
                self._annotation.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._annotation is not None:
            self._annotation.__exit__(None, None, None)
        ended = time.perf_counter_ns()
        _unfinished.discard(self)
        recording = _recording
        if recording is not None:
            recording.add(self, ended)


_unfinished: set[Span] = set()
_recording: Recording | None = None
_lock = threading.Lock()


class Recording:
    """Records this process during one step."""

    def __init__(self, *, step: int, torch: bool, begin: str, shapes: bool, stack: bool, memory: bool, seconds: float):
        self.step, self.began = step, time.perf_counter_ns()
        self.spans: deque[tuple[int, str, str, int, int, bool]] = deque(maxlen=MOST_SPANS)
        self.count = 0
        self.notes: list[str] = []
        self._wanted, self._shapes, self._stack, self._memory, self._seconds = torch, shapes, stack, memory, seconds
        self._waits_for_update = begin == "update"
        self._profiler: Any = None
        self._timer: threading.Timer | None = None
        self._stopping = threading.Lock()
        self._stopped = False
        self._device = ""
        """The GPU whose memory is recorded."""
        if torch and not self._waits_for_update:
            self.start_profiler()

    @property
    def annotates(self) -> bool:
        """True while torch's profiler records."""
        return self._profiler is not None and not self._stopped

    def entered(self, span: Span) -> None:
        """Starts torch's profiler with the first work of an update, if it waits for that."""
        if self._waits_for_update and span.work.split()[0] in ("train", "pass"):
            with self._stopping:
                waits, self._waits_for_update = self._waits_for_update, False
            if waits and self._wanted:
                self.start_profiler()

    def add(self, span: Span, ended: int, unfinished: bool = False) -> None:
        if not span.work.startswith(f"call {OWN}"):
            self.count += 1
            self.spans.append((span.number, span.thread, span.work, max(span.began, self.began), ended, unfinished))

    def start_profiler(self) -> None:
        import torch
        from torch._C._profiler import _ExperimentalConfig
        from torch.profiler import ProfilerActivity, profile

        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it tells of each start and stop
        activities, gpu = [ProfilerActivity.CPU], torch.cuda.is_available() and torch.cuda.is_initialized()
        if gpu:
            activities.append(ProfilerActivity.CUDA)
        if self._memory and gpu:
            self._device = f"cuda:{torch.cuda.current_device()}"
            torch.cuda.memory._record_memory_history(max_entries=MOST_ALLOCATIONS)
        self._profiler = profile(
            activities=activities,
            record_shapes=self._shapes,
            with_stack=self._stack,
            experimental_config=_ExperimentalConfig(profile_all_threads=True),
        )
        self._profiler.start()
        self._timer = threading.Timer(self._seconds, self._stop_early)
        self._timer.daemon = True
        self._timer.start()

    def _stop_early(self) -> None:
        self._stop(f"torch's profiler recorded the first {self._seconds:g} s (profile.seconds)")

    def _stop(self, note: str = "") -> None:
        """Stops torch's profiler, unless that was done already, and notes why. A call that comes meanwhile waits for it."""
        with self._stopping:
            if self._stopped or self._profiler is None:
                return
            self._stopped = True
            import torch

            if torch.cuda.is_available() and torch.cuda.is_initialized():
                torch.cuda.synchronize()
            self._profiler.stop()
            if note:
                self.notes.append(note)

    def end(self, directory: Path, name: str) -> dict[str, Any]:
        """Returns what was recorded, and writes files of torch into the directory, with this name."""
        now = time.perf_counter_ns()
        self._waits_for_update = False
        for span in list(_unfinished):
            self.add(span, now, True)
        if (lost := self.count - len(self.spans)) > 0:
            self.notes.append(f"the timeline lacks the first {lost:,} spans: a process keeps {MOST_SPANS:,} of a step")
        if self._timer is not None:
            self._timer.cancel()
        self._stop()
        files: list[tuple[str, int]] = []
        operations: list[dict[str, Any]] = []
        if self._profiler is not None:
            from rlhf_profile.operations import of_profiler

            operations = of_profiler(self._profiler)[:OPERATIONS]
            try:
                directory.mkdir(parents=True, exist_ok=True)
                files += [self._write_trace(directory / f"{name}.trace.json.gz")]
                files += self._write_memory(directory / f"{name}.memory.pickle")
            except OSError as error:
                self.notes.append(f"{error.filename or directory} cannot be written: {error.strerror or error}")
            if not operations:
                self.notes.append("torch's profiler saw no operation")
        elif self._wanted:
            self.notes.append("torch's profiler did not start: this process computed no update in the step")
        return {
            "identity": identity(),
            "began": self.began,
            "ended": now,
            "spans": list(self.spans),
            "files": files,
            "operations": operations,
            "notes": self.notes,
        }

    def forget(self) -> None:
        """Ends the record without result."""
        self._waits_for_update = False
        if self._timer is not None:
            self._timer.cancel()
        self._stop()
        if self._device:
            import torch

            torch.cuda.memory._record_memory_history(enabled=None)

    def _write_trace(self, path: Path) -> tuple[str, int]:
        with tempfile.TemporaryDirectory(prefix="rlhf-profile-") as scratch:
            plain = Path(scratch, "trace.json")
            self._profiler.export_chrome_trace(str(plain))
            with plain.open("rb") as source, gzip.open(path, "wb", compresslevel=3) as target:
                shutil.copyfileobj(source, target, 1 << 20)
        return path.name, path.stat().st_size

    def _write_memory(self, path: Path) -> list[tuple[str, int]]:
        if not self._memory:
            return []
        if not self._device:
            self.notes.append("no snapshot of memory: it is of a GPU, and this process uses none")
            return []
        import torch

        torch.cuda.memory._dump_snapshot(str(path))
        torch.cuda.memory._record_memory_history(enabled=None)
        return [(path.name, path.stat().st_size)]


def check_torch() -> None:
    """Raises ``UserError`` for a version of torch that records only the thread that asks for it."""
    import torch
    from torch._C._profiler import _ExperimentalConfig

    try:
        _ExperimentalConfig(profile_all_threads=True)
    except TypeError:
        raise UserError(
            f"the profiler of torch {torch.__version__} cannot record all threads: install a newer torch, or give"
            " --profile.torch false for timelines alone"
        ) from None


def begin(end: Any, *, step: int, **settings: Any) -> None:
    """Begins to record this process, unless this step of it is recorded already."""
    global _recording
    with _lock:
        if _recording is not None and _recording.step != step:  # of a step whose end could not be told here
            _abandon()
        if _recording is None:
            _recording = Recording(step=step, **settings)
            observers.append(Span)


def abandon() -> None:
    """Ends what ``begin`` began, and forgets it."""
    with _lock:
        _abandon()


def _abandon() -> None:
    global _recording
    recording, _recording = _recording, None
    if recording is not None:
        observers.remove(Span)
        recording.forget()


def finish(end: Any, directory: str, names: dict[str, str]) -> dict[str, Any] | None:
    """Ends what ``begin`` began, and returns what was recorded; ``None``: another call has it.

    Args:
        names: the name of each process, by its identity.
    """
    global _recording
    with _lock:
        recording, _recording = _recording, None
        if recording is None:
            return None
        observers.remove(Span)
        return recording.end(Path(directory), names[identity()])
