"""Spans: named stretches of work in this process. Their seconds are counted where they are done, and observers see them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

observers: list[Callable[[str], AbstractContextManager[Any]]] = []
"""Each is called with the name of every span, and entered around it, on the thread that does the work. Spans of the event loop
overlap each other. The first word of a name is the kind of the work."""


@contextmanager
def span(work: str, total: Any = None, seconds: str = "compute_s") -> Iterator[None]:
    """Shows the body to the observers, and adds its time to the attribute ``seconds`` of ``total``, if there is one."""
    began = time.perf_counter()
    try:
        with ExitStack() as shown:
            for observer in observers:
                shown.enter_context(observer(work))
            yield
    finally:
        if total is not None:
            setattr(total, seconds, getattr(total, seconds) + time.perf_counter() - began)
