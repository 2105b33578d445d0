"""Trainable sessions: a run whose loop is its caller's. ``rlhf_host.trainable_session`` is ``trainable_session`` of this package.

Importing this loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_host.internals import lazily

if TYPE_CHECKING:
    from rlhf_session.functions import trainable_session as trainable_session
    from rlhf_session.losses import Loss as Loss
    from rlhf_session.rows import TrainingRow as TrainingRow
    from rlhf_session.session import TrainableSession as TrainableSession

__getattr__, __dir__, __all__ = lazily(__name__)
