"""Check after a sync: engines and trainer must agree on the log-probabilities of a probe."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from rlhf_host.errors import LostError, RunError, beyond
from rlhf_host.protocols import SyncTarget
from rlhf_host.records.episodes import Generation, Sampling, Segment, Task, Trajectory

PROMPT_TOKENS = 320
"""Ten blocks of 32 tokens: a prompt within one block is not cached, and would hide a stale prefix cache."""
NEW_TOKENS = 8
AUTO = 2
"""Number of syncs that ``auto`` verifies. The second detects keys and values kept from the first."""
PROBES = 4
"""Number of continuations of the probe by a restarted engine: each may end after a few tokens."""
ATTEMPTS = 3
"""Number of probes of an engine before it counts as different: in 16 bits rounding alone can change single tokens a lot."""
TOLERANCE = 1e-4
"""Tolerance of the mean difference over a probe's tokens, in nats; the same for the next two."""
RUN_TOLERANCE = 1e-3
"""Tolerance in a run in which everything computes in 32 bits."""
ROUGH_TOLERANCE = 0.1
"""Tolerance if either side computes in 16 bits; stale keys and values are off by about 1."""


def verified_syncs(setting: str | int, *, moved: bool = True) -> float:
    """Returns how many syncs of a run are verified under ``--sync.verify auto|on|off|N``.

    Args:
        moved: True if weights are sent. If engines sample from the trainer's own module, ``auto`` verifies nothing.
    """
    named = {"auto": AUTO if moved else 0, "on": float("inf"), "off": 0}
    return named[setting] if setting in named else int(setting)


def probe_prompt(tokenizer: Any, context_length: int) -> list[int]:
    """Returns the same several hundred ordinary tokens every time, so that engines have them in their caches; fewer if the
    model has no room for them.
    """
    special = set(tokenizer.all_special_ids)
    ordinary = [token for token in range(min(len(tokenizer), 4096)) if token not in special]
    length = max(1, min(PROMPT_TOKENS, context_length - NEW_TOKENS - 1))
    return np.random.default_rng(0).choice(ordinary, length).tolist()


async def verify_sync(
    targets: Sequence[SyncTarget],
    logprobs: Callable[[Sequence[Trajectory]], Awaitable[list[list[float]]]],
    version: int,
    prompt: Sequence[int],
    *,
    temperature: float = 1.0,
    tolerance: float = TOLERANCE,
) -> float:
    """Compares engines with the trainer. Every engine continues ``prompt``; its sampled log-probabilities are compared with the
    trainer's, by the mean difference over a continuation. An engine that differs is asked again, for other tokens; an engine
    that dies meanwhile is left out.

    Args:
        logprobs: computes the actor's, for completions at ``temperature`` (``RoleHandle.logprobs``).

    Returns:
        The largest mean difference in nats that was accepted.

    Raises:
        RunError: an engine has another version, or differs by more than ``tolerance`` in every attempt.
    """
    sampling = Sampling(NEW_TOKENS, temperature)
    largest, asked = 0.0, list(enumerate(targets))
    for attempt in range(ATTEMPTS):
        requests = (target.engine.generate(prompt, sampling, (0, 0, 0, 0, version, attempt, i)) for i, target in asked)
        answers: list[Generation | BaseException] = await asyncio.gather(*requests, return_exceptions=True)
        alive: list[tuple[int, SyncTarget]] = []
        generations: list[Generation] = []
        for one, answer in zip(asked, answers, strict=True):
            if isinstance(answer, Generation):
                _check_version(one[1].name, answer, version)
                generations.append(answer)
                alive.append(one)
            elif not isinstance(answer, LostError):
                raise answer
        if not alive:
            return largest
        expected = await logprobs([_trajectory(prompt, generation) for generation in generations])
        gaps = [_mean_gap(generation.logprobs, trained) for generation, trained in zip(generations, expected, strict=True)]
        asked = [one for one, gap in zip(alive, gaps, strict=True) if not gap <= tolerance]  # NaN too
        largest = max(largest, *(gap for gap in gaps if gap <= tolerance), 0.0)
        if not asked:
            return largest
    name, gap = asked[0][1].name, next(gap for gap in gaps if not gap <= tolerance)
    raise RunError(
        f"engine {name} does not have the trainer's weights of version {version}: their log-probabilities of a probe differ by"
        f" {beyond(gap, tolerance)}, on average, {ATTEMPTS} times. Either weights were left out of the sync, or"
        " the engine keeps a prefix cache from before it, or the two compute in different precision (--sync.verify off)"
    )


def _check_version(name: str, generation: Generation, version: int) -> None:
    if set(generation.versions) != {version}:
        raise RunError(
            f"engine {name} samples under version {sorted(set(generation.versions))} after the sync of version {version}"
        )


def _mean_gap(sampled: Sequence[float], trained: Sequence[float]) -> float:
    return float(np.abs(np.asarray(sampled, dtype=np.float64) - np.asarray(trained, dtype=np.float64)).mean())


def _trajectory(prompt: Sequence[int], generation: Generation) -> Trajectory:
    action = Segment("action", generation.token_ids, generation.logprobs, generation.versions)
    return Trajectory("sync-probe", "sync-probe", Task("sync probe"), [Segment("prompt", list(prompt)), action])
