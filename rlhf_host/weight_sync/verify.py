"""After a sync: do engines and trainer agree on the log-probabilities of a probe?"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from rlhf_host.errors import LostError, RunError
from rlhf_host.protocols import SyncTarget
from rlhf_host.records.episodes import Generation, Sampling, Segment, Task, Trajectory

PROMPT_TOKENS = 320
"""Ten blocks of 32 tokens: a prompt within one block is not cached, and would hide a stale prefix cache."""
NEW_TOKENS = 8
AUTO = 2
"""Syncs that ``auto`` verifies. The second is the one that finds keys and values kept from the first."""
PROBES = 4
"""Continuations of the probe by an engine that was started again: each may end after a few tokens."""
TOLERANCE = 1e-4
RUN_TOLERANCE = 1e-3
"""In a run, where all compute in 32 bits."""
ROUGH_TOLERANCE = 0.2
"""Where either side computes in 16 bits; stale keys and values are off by about 1."""


def verified_syncs(setting: str | int, *, moved: bool = True) -> float:
    """How many syncs of a run are verified under ``--sync.verify auto|on|off|N``.

    Args:
        moved: weights were sent; where engines sample from the trainer's own module, ``auto`` verifies nothing.
    """
    named = {"auto": AUTO if moved else 0, "on": float("inf"), "off": 0}
    return named[setting] if setting in named else int(setting)


def probe_prompt(tokenizer: Any, context_length: int) -> list[int]:
    """The same several hundred ordinary tokens every time, so that engines have them in their caches; shorter where the
    model has no room for them."""
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
    """Every engine continues ``prompt``; its sampled log-probabilities are compared with the trainer's. One that dies in it is
    left out.

    Args:
        logprobs: the actor's, of completions at ``temperature`` (``RoleHandle.logprobs``).

    Returns:
        The largest difference in nats.

    Raises:
        RunError: an engine has another version, or differs by more than ``tolerance``.
    """
    sampling = Sampling(NEW_TOKENS, temperature)
    asked = (target.engine.generate(prompt, sampling, (0, 0, 0, 0, 0, i, version)) for i, target in enumerate(targets))
    answers: list[Generation | BaseException] = await asyncio.gather(*asked, return_exceptions=True)
    targets = [target for target, answer in zip(targets, answers, strict=True) if not isinstance(answer, LostError)]
    generations: list[Generation] = []
    for answer in answers:
        if isinstance(answer, Generation):
            generations.append(answer)
        elif not isinstance(answer, LostError):
            raise answer
    if not generations:
        return 0.0
    expected = await logprobs([_trajectory(prompt, generation) for generation in generations])
    largest = 0.0
    for target, generation, trained in zip(targets, generations, expected, strict=True):
        if set(generation.versions) != {version}:
            raise RunError(
                f"engine {target.name} samples under version {sorted(set(generation.versions))} after the sync of version {version}"
            )
        gaps = np.abs(np.asarray(generation.logprobs, dtype=np.float64) - np.asarray(trained, dtype=np.float64))
        gap = float(gaps.max())
        if not gap <= tolerance:  # NaN too
            raise RunError(
                f"engine {target.name} does not have the trainer's weights of version {version}: their log-probabilities of a"
                f" probe differ by {gap:.2g} (at most {tolerance:g} expected). Either weights were left out of the sync, or the"
                " engine keeps a prefix cache from before it, or the two compute in different precision (--sync.verify off)"
            )
        largest = max(largest, gap)
    return largest


def _trajectory(prompt: Sequence[int], generation: Generation) -> Trajectory:
    action = Segment("action", generation.token_ids, generation.logprobs, generation.versions)
    return Trajectory("sync-probe", "sync-probe", Task("sync probe"), [Segment("prompt", list(prompt)), action])
