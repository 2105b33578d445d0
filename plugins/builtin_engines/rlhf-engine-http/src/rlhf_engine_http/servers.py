"""Knowledge of the engine: of each server, of the run's model and of the weights that servers should have."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rlhf_engine_http.balance import Prefixes
from rlhf_engine_http.connection import Connection
from rlhf_engine_http.dialects import Dialect, Facts
from rlhf_engine_http.weights import Stored

SHAPES = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads"),
)
"""Names in a model's configuration that tell it from others."""


@dataclass(frozen=True, slots=True)
class Model:
    """What servers must have in common with the run's model."""

    name: str
    """Its name or directory, for commands."""
    vocabulary: int
    context_length: int | None
    ends: frozenset[int]
    shape: dict[str, Any]
    """Values of ``SHAPES`` in its configuration."""
    probe: Sequence[int]
    """A prompt on which servers are compared."""


@dataclass(eq=False, slots=True)
class Weights:
    """Weights that all servers should have."""

    stored: Stored
    version: int
    label: str
    likeliest: dict[int, float] | None = None
    """Log-probabilities of tokens after the probe, by the first server that had these weights."""
    exact: bool = False
    """That server's ``Facts.exact``."""
    source: str = ""
    """Its address."""


@dataclass(slots=True)
class Counts:
    """What a server did since the last metrics."""

    requests: int = 0
    """Number of answers that were used."""
    tokens: int = 0
    """Number of tokens in them."""
    failures: int = 0
    """Number of requests that went to others, or were sent again."""
    prompt_tokens: int = 0
    known_tokens: int = 0
    """Those of ``prompt_tokens`` that it had been sent or answered with before."""
    most_open: int = 0
    """Largest number of open requests."""
    waiting: float = 0.0
    """Largest queue that it told of."""


@dataclass(eq=False, slots=True)
class Server:
    connection: Connection
    dialect: Dialect
    facts: Facts
    state: Literal["serving", "behind", "down"] = "behind"
    """``behind``: it is up, and has other weights than it should."""
    leaving: bool = False
    """True if it is no longer named: it gets no new request, and is let go after the last one."""
    open: int = 0
    trouble: str = ""
    """What is wrong while it is down."""
    loading: bool = False
    watch: asyncio.Task[None] | None = field(default=None, repr=False)
    calls: set[asyncio.Future[Any]] = field(default_factory=set, repr=False)
    """Requests that wait for its answers."""
    misses: int = 0
    """Number of looks in a row at which it was silent."""
    prefixes: Prefixes = field(default_factory=Prefixes, repr=False)
    counts: Counts = field(default_factory=Counts)
    told: dict[str, float] = field(default_factory=dict)
    """Its own counters (``Dialect.told``) at the last metrics."""
    now: dict[str, float] = field(default_factory=dict)
    """The same at present."""

    @property
    def url(self) -> str:
        return self.connection.url


@dataclass(eq=False, slots=True)
class Newcomer:
    """A server that is named, and was not met yet."""

    connection: Connection
    trouble: str = "it was not asked yet"
    task: asyncio.Task[None] | None = field(default=None, repr=False)
