"""A policy that a program reaches over HTTP."""

from __future__ import annotations

from typing import Protocol


class Endpoint(Protocol):
    """The base URL of one attempt at an episode, for any program that speaks OpenAI's API, and the reports of the program."""

    base_url: str
    """Base URL; ends in ``/v1``. One level up, ``POST reward``, ``done`` and ``fail`` take the program's reports."""

    shared_url: str
    """The base URL of all episodes together, for programs that can use only one. A request there names its episode in its body:
    ``"metadata": {"rlhf_episode": token}``.
    """
    token: str

    @property
    def api_key(self) -> str:
        """API key for clients that require one."""

    calls: int
    """Number of answers that were requested."""
    reward: float | None
    score: float | None
    metrics: dict[str, float]
    final: str | None
    """Id of the answer whose row is final, if the program named one."""
    failed: tuple[str, bool] | None
    """Reason for which the program gave up, and True if another attempt may succeed."""
    truncated: bool
    """True if a call found no room left in ``rollout.max_tokens``."""
    lost: Exception | None
    """Error that ended the engine, if there was one: the engine answers nothing any more."""
