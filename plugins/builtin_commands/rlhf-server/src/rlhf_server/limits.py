"""How much a client may ask for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Requests above these are refused by name."""

    body_bytes: int = 16 << 20
    """Of a conversation."""
    report_bytes: int = 64 << 10
    """Of what a program reports."""
    messages: int = 4096
    tools: int = 512
    choices: int = 8
    stops: int = 16
    stop_characters: int = 1000
    calls: int = 256
    """Of one episode."""
    calls_at_once: int = 32
    """Of one episode, waiting for their answers."""
    in_flight: int = 4096
    """Of all episodes together."""
