"""What is being done while there is nothing else to see: a line each on standard error, so that results can be piped."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def phase(text: str) -> None:
    print(f"{text} ...", file=sys.stderr, flush=True)


def counted(items: Iterable[T], line: str, size: Callable[[T], int]) -> Iterator[T]:
    """The items, with a line on standard error that goes when they end; ``{task.completed}`` in it is the sum of their sizes."""
    from rich.console import Console
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    with Progress(TextColumn(line), TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("")
        for item in items:
            yield item
            bar.advance(task, size(item))
