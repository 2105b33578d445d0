"""Sets of tokens in few bytes: those that could be drawn in place of each token of a row, where sampling is truncated.

A set is ``bytes``: ``h`` and ids of 2 bytes, ``i`` and ids of 4, or ``b`` and a bit for each token up to the largest, whichever is
shortest. No bytes: the set of all tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from statistics import fmean
from typing import Any, TypeAlias

import numpy as np

from rlhf_host.errors import UserError
from rlhf_host.records.episodes import Trajectory
from rlhf_host.records.generations import SUPPORT

Sets: TypeAlias = Sequence[bytes] | None
_TYPES = {b"h": "<u2", b"i": "<u4"}


def pack_tokens(ids: np.ndarray) -> bytes:
    """Returns the set of these token ids, which are sorted and at least one."""
    size = int(ids[-1]) + 1
    kind = b"h" if size <= 1 << 16 else b"i"
    listed: np.ndarray = ids.astype(_TYPES[kind])
    if listed.nbytes <= size // 8:
        return kind + listed.tobytes()
    return b"b" + np.packbits(np.bincount(ids, minlength=size).astype(np.bool_)).tobytes()


def unpack_tokens(one: bytes) -> np.ndarray:
    """Returns the sorted token ids of a set; none for that of all tokens. Raises ``ValueError`` or ``TypeError`` for others."""
    if one[:1] == b"b":
        return np.unpackbits(np.frombuffer(one, np.uint8, offset=1)).nonzero()[0]
    return np.frombuffer(one, _TYPES.get(one[:1], "no set of tokens"), offset=1) if one else np.zeros(0, np.int64)


def check_support(sets: np.ndarray) -> None:
    """Raises ``ValueError`` or ``TypeError`` unless these are sets as ``pack_tokens`` makes them, or of all tokens, in one row."""
    if sets.dtype != object or sets.ndim != 1:
        raise ValueError(f"{SUPPORT} is a row of sets of tokens")
    for one in filter(None, sets):
        ids = unpack_tokens(one).astype(np.int64)
        if not len(ids) or not (ids[1:] > ids[:-1]).all() or pack_tokens(ids) != one:
            raise ValueError(f"{SUPPORT} has no set of tokens in {one[:32].hex()}: ids rise, and take the fewest bytes")


def support_trace(prompt: int, sets: Iterable[bytes]) -> Mapping[str, np.ndarray]:
    """Returns the sets of an answer's tokens, after a prompt of so many, as its ``Generation.traces``."""
    return {SUPPORT: np.array([b""] * (prompt - 1) + [*sets], dtype=object)}


def of_completions(traces: Sequence[Mapping[str, Any]] | None, lengths: Sequence[int]) -> np.ndarray | None:
    """Returns ``[C]``: the set of each completion token of rows, one row after the other; None where all tokens could be drawn.

    Args:
        traces: as in ``Batch.traces``.
        lengths: number of completion tokens of each row.
    """
    told = [own.get(SUPPORT) for own in traces or ()]
    if all(own is None for own in told):
        return None
    parts = zip(told, lengths, strict=True)
    return np.concatenate([np.full(n, b"", object) if own is None else own[len(own) - n :] for own, n in parts])


def support_metrics(rows: Iterable[Trajectory], *, needed: bool) -> dict[str, float]:
    """Returns metrics of the sets of sampled tokens: their size, their bytes, and the share of those with one token, which teaches
    nothing. Raises ``UserError`` for an unknown set where all are needed, and for a set without the token that was drawn.
    """
    sizes, lengths = list[int](), list[int]()
    for row in rows:
        told, counts = row.traces.get(SUPPORT, ()), [len(segment.token_ids) for segment in row.segments]
        for segment, begin in zip(row.segments, accumulate(counts, initial=-1), strict=False):
            if segment.logprobs is None or not (needed or len(told)):
                continue
            own = told[max(0, begin) : begin + len(segment.token_ids)] if len(told) == sum(counts) - 1 else ()
            sets = [unpack_tokens(one) for one in own]
            drawn = zip(segment.token_ids, sets, strict=False)
            if len(sets) < len(segment.token_ids) or not all(token in one for token, one in drawn):
                raise UserError(
                    f"episode {row.episode_id} was sampled with top_p, top_k or min_p, and the tokens that could be drawn are not"
                    " known: rows that an agent makes or changes itself, and those saved without these tokens, cannot be trained"
                    " on with the truncation: set --rollout.top-p 1 --rollout.top-k 0 --rollout.min-p 0"
                )
            sizes += map(len, sets)
            lengths += map(len, own)
    means: dict[str, list[int]] = {"size": sizes, "bytes": lengths, "single": [size == 1 for size in sizes]} if sizes else {}
    return {f"support/{name}": fmean(values) for name, values in means.items()}
