"""A few worker processes that judge answers. Their limit is processor time, so that a busy machine changes no verdict."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from rlhf_plugin_math_verifier.claims import Claim

Verdict = Literal["right", "wrong", "unjudged", "timeout", "label", "failed"]
"""Verdict. ``unjudged``: a person would have to decide. ``timeout``: the answer took too much processor time, or broke the
process. ``label``: nothing can be compared with the label. ``failed``: processes could not be started, died repeatedly for
another reason, or were all busy for too long.
"""

Late = Literal["late"]
"""Result of a try whose processor time was over."""

MODULE = "rlhf_plugin_math_verifier.worker"
START_TIMEOUT_S = 1800.0
"""Seconds for a worker to start: on a busy machine its imports alone take minutes."""
ATTEMPTS = 3
FIRST_TRY_S = 1.0
"""Seconds of processor time. An answer that takes longer is tried again, with its whole limit, when no other waits for its
first try.
"""
REMEMBERED = 10_000
"""Maximum number of remembered verdicts: a text that a model repeats is judged once."""

logger = logging.getLogger(__name__)


class TookTooLong(Exception):
    """The processor time is over; the process is dead."""


class WorkerDied(Exception):
    """The process ended without an answer; ``crashed``: by its own fault, which an answer can cause."""

    def __init__(self, message: str, crashed: bool = False):
        super().__init__(message)
        self.crashed = crashed


@dataclass(frozen=True, slots=True)
class Request:
    label: str
    claim: Claim
    decimals: int
    timeout_s: float


@dataclass(order=True, slots=True)
class Job:
    """A request in the queue; those with a lower turn come first. No request: the end."""

    turn: int
    number: int
    request: Request | None = field(default=None, compare=False)
    future: Future[Verdict] = field(default_factory=Future, compare=False)
    since: float = field(default_factory=time.monotonic, compare=False)


class Worker:
    """One process and its pipes, used by one thread at a time; any thread may ``kill`` it."""

    def __init__(self, memory_mb: int):
        environment = {
            **os.environ,
            "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": "1",
        }  # sympy's order of sets: the same in every run
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", MODULE, str(memory_mb)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )

    def wait_until_ready(self) -> None:
        """Waits until the process is ready. Raises ``WorkerDied`` with the reason."""
        try:
            reply = self._exchange(b"", START_TIMEOUT_S)
        except TimeoutError as error:
            raise WorkerDied(f"not ready after {START_TIMEOUT_S:.0f} s") from error
        if "error" in reply:
            raise WorkerDied(reply["error"])

    def ask(self, request: Request, wait_s: float) -> dict[str, Any]:
        """Sends a request; returns the answer. Raises ``TookTooLong``, ``TimeoutError`` (no answer for ``wait_s``; the process
        is now dead) or ``WorkerDied``.
        """
        return self._exchange(json.dumps(asdict(request)).encode() + b"\n", wait_s)

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            self.process.kill()

    def discard(self) -> None:
        """Kills, reaps and closes the process; called by the thread that uses it."""
        self.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                if pipe:
                    pipe.close()

    def _exchange(self, line: bytes, wait_s: float) -> dict[str, Any]:
        process, expired = self.process, threading.Event()
        assert process.stdin
        assert process.stdout

        def expire() -> None:
            expired.set()
            self.kill()

        timer = threading.Timer(wait_s, expire)
        timer.daemon = True
        timer.start()
        try:
            process.stdin.write(line)
            process.stdin.flush()
            answer = process.stdout.readline()
        except (OSError, ValueError):
            answer = b""
        finally:
            timer.cancel()
        if answer.endswith(b"\n"):
            return json.loads(answer)
        self.kill()
        code = process.wait()
        if expired.is_set():
            raise TimeoutError
        if code == -getattr(signal, "SIGPROF", 0):
            raise TookTooLong
        faults = {-getattr(signal, name, 0) for name in ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE")}
        raise WorkerDied(f"exit code {code}", crashed=code in faults)


class Pool:
    """Pool of processes. Call ``submit`` from any thread or event loop. One process starts with the first request, others where
    requests still wait when it has been ready for a while; each has a thread.
    """

    def __init__(self, workers: int, timeout_s: float, memory_mb: int, wait_s: float = 120.0):
        self.pid = os.getpid()
        self._size, self._timeout_s, self._memory_mb, self._wait_s = workers, timeout_s, memory_mb, wait_s
        self._queue: queue.PriorityQueue[Job] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._verdicts: dict[Request, Future[Verdict]] = {}
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._alive: set[Worker] = set()
        self._start_s: float | None = None
        self._growing = False
        self._closed = False
        self._labels: dict[str, bool] = {}
        self._warned = False
        atexit.register(self.close)

    @property
    def pids(self) -> list[int]:
        """Process ids of the living processes."""
        with self._lock:
            return [worker.process.pid for worker in self._alive]

    def submit(self, label: str, claim: Claim, decimals: int) -> Future[Verdict]:
        """Returns the future verdict. Others may wait for the same one, so do not cancel it.

        Raises ``RuntimeError`` once closed.
        """
        request = Request(label, claim, decimals, self._timeout_s)
        with self._lock:
            if self._closed:
                raise RuntimeError("the pool is closed")
            if (known := self._verdicts.get(request)) is not None:
                return known
            job = Job(0, next(self._numbers), request)
            self._verdicts[request] = job.future
            if len(self._verdicts) > REMEMBERED:
                del self._verdicts[next(iter(self._verdicts))]
            self._queue.put(job)
            if not self._threads:
                self._begin()
            self._grow_soon()
        return job.future

    def close(self) -> None:
        """Ends every process now, and cancels waiting requests. Does nothing the second time, or in a fork of the process."""
        if os.getpid() != self.pid:
            return
        with self._lock:
            self._closed = True
            workers = list(self._alive)
        atexit.unregister(self.close)
        with contextlib.suppress(queue.Empty):
            while True:
                future = self._queue.get_nowait().future
                if not future.cancel():  # it had its first try
                    future.set_result("failed")
        for worker in workers:
            worker.kill()
        for _ in self._threads:
            self._queue.put(Job(-1, next(self._numbers)))
        for thread in self._threads:
            thread.join(timeout=5)

    def _begin(self) -> None:
        """Starts a thread, which starts a process at its first request. The lock is held."""
        thread = threading.Thread(target=self._serve, name="math-verifier", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _grow_soon(self) -> None:
        """Lets ``_grow`` run after as long as a start took, for that is what another process costs: most requests take
        milliseconds. The lock is held.
        """
        if self._start_s is not None and not self._growing and not self._closed and len(self._threads) < self._size:
            self._growing = True
            timer = threading.Timer(self._start_s, self._grow)
            timer.daemon = True
            timer.start()

    def _grow(self) -> None:
        with self._lock:
            self._growing = False
            if not self._closed:
                for _ in range(min(self._queue.qsize(), self._size - len(self._threads))):
                    self._begin()

    def _serve(self) -> None:
        worker: Worker | None = None
        while (job := self._queue.get()).request:
            try:
                if job.turn == 0:
                    job.future.set_running_or_notify_cancel()
                verdict, worker = self._take(job, job.request, worker)
                if verdict == "late":
                    with self._lock:
                        if not self._closed:
                            self._queue.put(replace(job, turn=1))
                            continue
                    verdict = "failed"
                job.future.set_result(verdict)
            except BaseException as error:  # a thread that dies would leave its callers waiting
                job.future.set_exception(error)
        if worker:
            self._discard(worker)

    def _take(self, job: Job, request: Request, worker: Worker | None) -> tuple[Verdict | Late, Worker | None]:
        """Returns the verdict; ``late``: the first try took too long."""
        verdict: Verdict | Late
        waited = time.monotonic() - job.since > self._wait_s
        if waited:
            verdict = "failed"
        elif job.turn == 0 and request.timeout_s > FIRST_TRY_S:
            verdict, worker = self._judge(replace(request, timeout_s=FIRST_TRY_S), worker)
            if verdict == "late":
                return verdict, worker
        else:
            verdict, worker = self._judge(request, worker)
        if verdict in ("timeout", "late"):
            verdict, worker = self._blame(request, worker)
        if waited or verdict == "failed":  # another time it may be judged
            with self._lock:
                self._verdicts.pop(request, None)
        return verdict, worker

    def _judge(self, request: Request, worker: Worker | None) -> tuple[Verdict | Late, Worker | None]:
        crashes = 0
        for _ in range(ATTEMPTS):
            if self._closed:
                break
            try:
                worker = worker or self._start()
                reply = worker.ask(request, self._wait_s)
            except TookTooLong:
                self._discard(worker)
                return "late", None
            except TimeoutError:
                self._discard(worker)
                return "failed", None
            except (WorkerDied, OSError) as error:
                crashes += isinstance(error, WorkerDied) and error.crashed
                if worker:
                    self._discard(worker)
                worker = None
                self._warn(error)
                continue
            if reply["retire"]:
                self._discard(worker)
                worker = None
            return reply["verdict"], worker
        return ("timeout" if crashes == ATTEMPTS else "failed"), worker

    def _blame(self, request: Request, worker: Worker | None) -> tuple[Verdict, Worker | None]:
        """Finds the cause of a timeout: it is the label if that takes as long against an answer of one digit."""
        if request.label not in self._labels:
            verdict, worker = self._judge(Request(request.label, Claim("7"), request.decimals, request.timeout_s), worker)
            if verdict == "failed":
                return "failed", worker
            self._labels[request.label] = verdict in ("right", "wrong")
        return ("timeout" if self._labels[request.label] else "label"), worker

    def _start(self) -> Worker:
        begun = time.monotonic()
        worker = Worker(self._memory_mb)
        with self._lock:
            self._alive.add(worker)
            closed = self._closed
        try:
            if closed:
                raise WorkerDied("the pool is closed")
            worker.wait_until_ready()
        except WorkerDied:
            self._discard(worker)
            raise
        finally:
            with self._lock:
                self._start_s = time.monotonic() - begun
                self._grow_soon()
        return worker

    def _discard(self, worker: Worker | None) -> None:
        if worker:
            worker.discard()
            with self._lock:
                self._alive.discard(worker)

    def _warn(self, error: Exception) -> None:
        if not self._warned and not self._closed:
            self._warned = True
            logger.warning(
                "a math-verifier worker process ended (%s); it is started again, at most %d times an answer", error, ATTEMPTS
            )
