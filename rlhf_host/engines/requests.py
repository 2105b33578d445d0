"""One completion to sample, as engines pass it on."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_host.records.episodes import SampleKey, Sampling


@dataclass(frozen=True, slots=True)
class Request:
    """``key`` fixes its uniforms, whatever else is in the batch."""

    token_ids: tuple[int, ...]
    sampling: Sampling
    key: SampleKey
