"""Counter-based uniforms, which depend only on a request's key and the token's number."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from rlhf_host.records.episodes import SampleKey

BLOCK = 64
"""Number of uniforms made at a time: those of tokens ``[block * BLOCK, (block + 1) * BLOCK)``."""


def uniform_block(keys: Sequence[SampleKey], block: int) -> np.ndarray:
    """Returns ``[len(keys), BLOCK]`` float64 in [0, 1), 53 random bits each.

    They are SHAKE-128 of the key and the block number: stable across machines, and one hash call per row is cheaper than a
    generator.
    """
    suffix = f"|{block}".encode()
    digests = [hashlib.shake_128(",".join(map(str, key)).encode() + suffix).digest(8 * BLOCK) for key in keys]
    words = np.frombuffer(b"".join(digests), dtype="<u8").reshape(len(keys), BLOCK)
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
