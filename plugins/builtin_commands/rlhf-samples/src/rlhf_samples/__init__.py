"""Samples without training: ``rollout`` samples and scores, ``replay`` scores again and computes advantages again.

Both accept what ``rlhf_host.train`` accepts: plugins may be names, classes or instances with hooks, rewards plain functions, and
data rows in memory. Every other setting is a keyword, as a section, ``rollout={"n": 4}``, or dotted, ``**{"rollout.n": 4}``.
Importing this loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_samples.changes import Change, Replay
    from rlhf_samples.functions import replay, rollout

_HOME = {"Change": "changes", "Replay": "changes", "replay": "functions", "rollout": "functions"}
"""Name → its module in this package, imported when the name is first asked for."""

__all__ = ["Change", "Replay", "replay", "rollout"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
