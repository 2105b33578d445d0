"""Semaphores of ``multiprocessing`` over a pipe, with a token in it for each acquisition that is free. The usual ones are files in
a folder that contained programs do not reach. Processes inherit these when they are forked."""

import os
import select
import struct
import threading
import time
from fcntl import ioctl

RECURSIVE = 0
FIONREAD = 0x541B


class SemLock:
    """Semaphore with the methods of ``_multiprocessing.SemLock``."""

    SEM_VALUE_MAX = 32_767
    """Maximum value: a pipe holds this many tokens."""

    def __init__(self, kind, value, maxvalue, name=None, unlink=True):
        self.kind, self.maxvalue, self.name, self.handle = kind, maxvalue, None, 0
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.write(self._write, bytes(value))
        self._owner, self._depth = None, 0

    def acquire(self, block=True, timeout=None):
        me = (os.getpid(), threading.get_ident())
        if self.kind == RECURSIVE and self._owner == me:
            self._depth += 1
            return True
        until = None if timeout is None else time.monotonic() + max(timeout, 0)
        while True:
            try:
                os.read(self._read, 1)
                self._owner, self._depth = me, 1
                return True
            except BlockingIOError:
                left = None if until is None else until - time.monotonic()
                if not block or (left is not None and left <= 0):
                    return False
                select.select([self._read], [], [], left)

    def release(self):
        if self.kind == RECURSIVE:
            if not self._is_mine():
                raise AssertionError("attempt to release recursive lock not owned by thread")
            self._depth -= 1
            if self._depth:
                return
        elif self._get_value() >= self.maxvalue:
            raise ValueError("semaphore or lock released too many times")
        self._owner, self._depth = None, 0
        os.write(self._write, b"\0")

    def _is_mine(self):
        return self._depth > 0 and self._owner == (os.getpid(), threading.get_ident())

    def _count(self):
        return self._depth if self._is_mine() else 0

    def _get_value(self):
        return struct.unpack("i", ioctl(self._read, FIONREAD, bytes(4)))[0]

    def _is_zero(self):
        return self._get_value() == 0

    def _after_fork(self):
        self._owner, self._depth = None, 0

    def __enter__(self):
        return self.acquire()

    def __exit__(self, *_):
        self.release()

    def __del__(self, close=os.close):  # other names may be gone when the interpreter ends
        close(self._read)
        close(self._write)


def install():
    """Prepares the programs of this process: they start others by forking, and share memory in the working folder."""
    import _multiprocessing
    import multiprocessing.heap

    _multiprocessing.SemLock = SemLock  # type: ignore[misc, assignment]
    multiprocessing.heap.Arena._dir_candidates = []  # type: ignore[attr-defined]
    multiprocessing.set_start_method("fork", force=True)
