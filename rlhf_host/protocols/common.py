"""Parts of all protocols: traits, the compute thread, weights in buckets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

Tensors: TypeAlias = "dict[str, Tensor]"
Bucket: TypeAlias = "list[tuple[str, Tensor]]"
"""Some of a model's weights by name. The tensors are valid until the next bucket is requested."""
Buckets: TypeAlias = "Iterator[Bucket]"

Writer: TypeAlias = "Callable[[], None]"
"""Writes files of what was copied before. It is called once, on any thread, while training goes on."""

NO_WEIGHTS = -1
"""The version of an engine that has no weights of this run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """Facts that the host must know about a plugin before it starts it."""

    libraries: tuple[str, ...] = ()
    """Modules that ``start`` imports and that may not be installed."""
    debug: bool = True
    """True if all its code runs in this process, on the calling thread, so a debugger can follow. ``--debug`` replaces other
    plugins.
    """
    only_by_name: bool = False
    """True for kernels that ``--kernels auto`` must not try."""


class Compute(Protocol):
    """The one thread of a process on which models compute."""

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Queue ``work``. It must not wait for other work. Any thread may call this."""
