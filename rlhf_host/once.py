"""Facts that hold as long as a command runs: each is looked up once inside ``looked_up_once``, and every time outside."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

_known: ContextVar[dict[Any, Any] | None] = ContextVar("known", default=None)
"""Function and its arguments → its answer."""


@contextmanager
def looked_up_once() -> Iterator[None]:
    before = _known.set({})
    try:
        yield
    finally:
        _known.reset(before)


def once(function: Function) -> Function:
    """A function of the file system, whose answers are the same until the command ends. An error is no answer."""

    @functools.wraps(function)
    def answer(*asked: Any, **named: Any) -> Any:
        if (known := _known.get()) is None:
            return function(*asked, **named)
        if (key := (function, asked, *named.items())) not in known:
            known[key] = function(*asked, **named)
        return known[key]

    return answer  # type: ignore[return-value]
