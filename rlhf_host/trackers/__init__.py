"""The host's own trackers, found by entry point like those of any package; and what trackers of packages share with them.

The names here are for packages: metrics and settings as plain values, and samples as rows of a table or as text. Importing this
loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_host.lazily import lazily

if TYPE_CHECKING:
    from rlhf_host.trackers.records import has_samples, numbers, readable, reward_cell, sample_rows, sample_texts, spread

_HOME = {
    "has_samples": "trackers.records",
    "numbers": "trackers.records",
    "readable": "trackers.records",
    "reward_cell": "trackers.records",
    "sample_rows": "trackers.records",
    "sample_texts": "trackers.records",
    "spread": "trackers.records",
}
"""Name → its module in ``rlhf_host``, imported when the name is first asked for."""

__all__ = ["has_samples", "numbers", "readable", "reward_cell", "sample_rows", "sample_texts", "spread"]

__getattr__, __dir__ = lazily(__name__, {name: f"rlhf_host.{home}" for name, home in _HOME.items()})
