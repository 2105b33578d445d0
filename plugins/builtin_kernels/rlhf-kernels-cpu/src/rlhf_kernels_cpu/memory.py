"""How the C library hands memory back: by default after almost every tensor, and then each page costs a fault once more."""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache

KEPT = 2**30
"""Bytes of freed memory that a process holds on to."""
LARGEST = 32 * 2**20
"""Bytes of an allocation up to which it comes out of held memory; the most that glibc takes here."""
HEAP = 64 * 2**20
"""Bytes of a thread's heap (glibc's own constant): asking for that much room keeps emptied ones."""

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # malloc.h


@cache
def keep_freed_memory() -> bool:
    """Have glibc keep up to 1 GiB of freed memory for the next tensors, in this process, from now on.

    On CPUs a training step allocates and frees the same activations again and again. Whoever has set ``MALLOC_*`` or
    ``GLIBC_TUNABLES`` keeps that, and other C libraries are left alone: ``False`` then.
    """
    if sys.platform != "linux" or any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, LARGEST) and mallopt(_TRIM_THRESHOLD, KEPT) and mallopt(_TOP_PAD, HEAP))
