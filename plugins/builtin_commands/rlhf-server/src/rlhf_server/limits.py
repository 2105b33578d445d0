"""Limits of requests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits; requests above them are refused, with the limit's name."""

    body_bytes: int = 16 << 20
    """Bytes of a conversation."""
    report_bytes: int = 64 << 10
    """Bytes of a program's report."""
    messages: int = 4096
    tools: int = 512
    choices: int = 8
    prompts: int = 256
    """Prompts of one request, times their choices."""
    stops: int = 16
    stop_characters: int = 1000
    calls: int = 256
    """Calls of one episode."""
    calls_at_once: int = 32
    """Calls of one episode that wait for their answers."""
    in_flight: int = 4096
    """Requests of all episodes together."""
