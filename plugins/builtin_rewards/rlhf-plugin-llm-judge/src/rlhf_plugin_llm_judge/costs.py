"""Counts of what a model did and cost, for each step and for the whole run."""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields
from typing import Any

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Counts:
    calls: int = 0
    """Answers of the server."""
    cached: int = 0
    """Answers that were known, or asked for already."""
    failed: int = 0
    """Answers that could not be had."""
    tokens_in: int = 0
    tokens_out: int = 0
    seconds: float = 0.0
    """Of all answers, tries included."""


class Costs:
    """Counts since the last step, and of the run.

    Args:
        price_in, price_out: of a million tokens.
        who: the model in messages.
    """

    def __init__(self, price_in: float, price_out: float, who: str):
        self.prices, self._who = (price_in, price_out), who
        self.now, self.before = Counts(), Counts()
        self._said = False

    def answered(self, answer: Any, seconds: float) -> None:
        """Counts an answer of the server, and the tokens that it says it took."""
        self.now.calls += 1
        self.now.seconds += seconds
        usage = getattr(answer, "usage", None)
        read, written = (getattr(usage, name, None) for name in ("prompt_tokens", "completion_tokens"))
        if isinstance(read, int) and isinstance(written, int):
            self.now.tokens_in += read
            self.now.tokens_out += written
        elif not self._said:
            self._said = True
            log.warning("the %s's server does not say how many tokens it took: tokens and cost are too low", self._who)

    def step(self) -> dict[str, float]:
        """Returns what was counted since the last call: with a ``cost`` if there are prices, and the mean ``latency_s``."""
        now = self.now
        values = {name: float(getattr(now, name)) for name in ("calls", "cached", "failed", "tokens_in", "tokens_out")}
        if any(self.prices):
            values["cost"] = self._cost(now)
        if now.calls:
            values["latency_s"] = now.seconds / now.calls
        self.before, self.now = self._whole(), Counts()
        return values

    def told(self) -> str:
        """Returns what was counted in all, in words."""
        whole = self._whole()
        cost = f", cost {self._cost(whole):.4g}" if any(self.prices) else ""
        return (
            f"{whole.calls} answers of the {self._who}, {whole.cached} known before, {whole.failed} failed;"
            f" {whole.tokens_in} tokens in, {whole.tokens_out} out{cost}"
        )

    def _whole(self) -> Counts:
        return Counts(*(getattr(self.before, field.name) + getattr(self.now, field.name) for field in fields(Counts)))

    def _cost(self, counts: Counts) -> float:
        return (counts.tokens_in * self.prices[0] + counts.tokens_out * self.prices[1]) / 1e6
