"""The host's own trackers, found by entry point like those of any package; and what trackers of packages share with them.

The names here are for packages: metrics and settings as plain values, and samples as rows of a table or as text. Importing this
loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_host.lazily import lazily

if TYPE_CHECKING:
    from rlhf_host.trackers.records import has_samples as has_samples
    from rlhf_host.trackers.records import numbers as numbers
    from rlhf_host.trackers.records import readable as readable
    from rlhf_host.trackers.records import reward_cell as reward_cell
    from rlhf_host.trackers.records import sample_rows as sample_rows
    from rlhf_host.trackers.records import sample_texts as sample_texts
    from rlhf_host.trackers.records import spread as spread

__getattr__, __dir__, __all__ = lazily(__name__)
