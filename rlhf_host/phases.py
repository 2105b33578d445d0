"""Progress of slow work, one line each on standard error, so that results can be piped."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

LONG_S = 10.0


def phase(text: str) -> None:
    print(f"{text} ...", file=sys.stderr, flush=True)


@contextmanager
def slow_phase(text: str) -> Iterator[None]:
    """Shows the line if the work inside takes long."""
    timer = threading.Timer(LONG_S, phase, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def counted(items: Iterable[T], line: str, size: Callable[[T], int]) -> Iterator[T]:
    """Yields the items, with a line on standard error that disappears when they end; ``{task.completed}`` in it is the sum of
    their sizes.
    """
    from rich.console import Console
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    with Progress(TextColumn(line), TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("")
        for item in items:
            yield item
            bar.advance(task, size(item))
