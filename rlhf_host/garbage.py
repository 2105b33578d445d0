"""Python's garbage collector, kept away from objects that stay loaded.

A full collection visits every object. With torch and transformers loaded it takes a third of a second, every few seconds, and
finds nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def freeze() -> None:
    """Excludes all living objects from later collections: for a process that only runs this run, once it has started."""
    gc.collect()
    gc.freeze()


@contextmanager
def frozen() -> Iterator[None]:
    """Does the same as ``freeze``, only inside the block: the process may be a notebook's, whose models must be collected when
    they are dropped. If something is frozen already, nothing changes.
    """
    if gc.get_freeze_count():
        yield
        return
    freeze()
    try:
        yield
    finally:
        gc.unfreeze()
