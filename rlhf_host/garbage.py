"""Python's garbage collector, kept away from objects that stay loaded.

A full collection visits every object. With torch and transformers loaded it takes a third of a second, every few seconds, and
finds nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_stays = False
"""True after ``freeze``. Python's own answer counts all objects, a tenth of a second for each run of a process with several."""


def freeze() -> None:
    """Excludes all living objects from later collections: for a process that only runs this run, once it has started."""
    global _stays
    gc.collect()
    gc.freeze()
    _stays = True


@contextmanager
def frozen() -> Iterator[None]:
    """Does the same as ``freeze``, only inside the block: the process may be a notebook's, whose models must be collected when
    they are dropped. If something is frozen already, nothing changes.
    """
    if _stays or gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
