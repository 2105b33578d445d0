"""Agents, data and rewards as environments of other projects.

``text_policy`` is the host's ``Policy`` over a function that answers; ``opened`` opens an ``Environment``, whose ``start`` gives
a ``Play``. Importing this loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_host.internals import lazily

if TYPE_CHECKING:
    from rlhf_environments.opening import opened as opened
    from rlhf_environments.playing import Environment as Environment
    from rlhf_environments.playing import Play as Play
    from rlhf_environments.playing import Result as Result
    from rlhf_environments.policy import Answer as Answer
    from rlhf_environments.policy import Question as Question
    from rlhf_environments.policy import text_policy as text_policy

__getattr__, __dir__, __all__ = lazily(__name__)
