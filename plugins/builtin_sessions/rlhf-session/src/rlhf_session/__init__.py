"""Trainable sessions: a run whose loop is its caller's. ``rlhf_host.trainable_session`` is ``trainable_session`` of this package.

Importing this loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_session.functions import trainable_session
    from rlhf_session.losses import Loss
    from rlhf_session.rows import TrainingRow
    from rlhf_session.session import TrainableSession

_HOME = {"Loss": "losses", "TrainableSession": "session", "TrainingRow": "rows", "trainable_session": "functions"}
"""Name → its module in this package, imported when the name is first asked for."""

__all__ = ["Loss", "TrainableSession", "TrainingRow", "trainable_session"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
