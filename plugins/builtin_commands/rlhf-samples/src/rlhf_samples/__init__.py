"""Samples without training: ``rollout`` samples and scores, ``replay`` scores again and computes advantages again.

Both accept what ``rlhf_host.train`` accepts: plugins may be names, classes or instances with hooks, rewards plain functions, and
data rows in memory. Every other setting is a keyword, as a section, ``rollout={"n": 4}``, or dotted, ``**{"rollout.n": 4}``.
Importing this loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_host.internals import lazily

if TYPE_CHECKING:
    from rlhf_samples.changes import Change as Change
    from rlhf_samples.changes import Replay as Replay
    from rlhf_samples.functions import replay as replay
    from rlhf_samples.functions import rollout as rollout

__getattr__, __dir__, __all__ = lazily(__name__)
