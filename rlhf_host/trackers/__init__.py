"""The host's own trackers, found by entry point like those of any package; and what trackers of packages share with them.

The names here are for packages: metrics and settings as plain values, and rows for a table of samples. Importing this loads no
torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_host.lazily import lazily

if TYPE_CHECKING:
    from rlhf_host.trackers.records import numbers, readable, sample_rows

_HOME = {
    "numbers": "trackers.records",
    "readable": "trackers.records",
    "sample_rows": "trackers.records",
}
"""Name → its module in ``rlhf_host``, imported when the name is first asked for."""

__all__ = ["numbers", "readable", "sample_rows"]

__getattr__, __dir__ = lazily(__name__, {name: f"rlhf_host.{home}" for name, home in _HOME.items()})
