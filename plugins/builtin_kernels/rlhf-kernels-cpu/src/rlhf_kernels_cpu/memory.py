"""Freed memory in the C library: by default it is returned after almost every tensor, and then each page costs a fault once
more.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache

KEPT = 2**30
"""Bytes of freed memory that a process keeps."""
LARGEST = 32 * 2**20
"""Largest allocation in bytes that uses kept memory; the maximum that glibc accepts here."""
HEAP = 64 * 2**20
"""Bytes of a thread's heap (glibc's own constant): asking for that much room keeps empty heaps."""

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # malloc.h


@cache
def keep_freed_memory() -> bool:
    """Makes glibc keep up to 1 GiB of freed memory for the next tensors, in this process, from now on.

    On CPUs a training step allocates and frees the same activations again and again. If ``MALLOC_*`` or ``GLIBC_TUNABLES`` are
    set, or with another C library, it changes nothing and returns False.
    """
    if sys.platform != "linux" or any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, LARGEST) and mallopt(_TRIM_THRESHOLD, KEPT) and mallopt(_TOP_PAD, HEAP))
