"""A policy that a program reaches over HTTP."""

from __future__ import annotations

from typing import Protocol


class Endpoint(Protocol):
    """The base URL of one attempt at an episode, for any program that speaks OpenAI's API, and what the program reported."""

    base_url: str
    """Ends in ``/v1``. One level up, ``POST reward``, ``done`` and ``fail`` take the program's reports."""

    shared_url: str
    """The base URL of all episodes together, for servers that know one only. A request there names its episode in its body:
    ``"metadata": {"rlhf_episode": token}``."""
    token: str

    @property
    def api_key(self) -> str:
        """For clients that want one."""

    calls: int
    """How many answers were asked for."""
    reward: float | None
    score: float | None
    metrics: dict[str, float]
    final: str | None
    """The id of the answer whose row is final, where the program named one."""
    failed: tuple[str, bool] | None
    """Why the program gave up, and whether another attempt may succeed."""
    truncated: bool
    """A call found no room left in ``rollout.max_tokens``."""
    lost: Exception | None
    """What ended the engine, where something did: it answers nothing any more."""
