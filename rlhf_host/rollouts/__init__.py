"""Rollouts: episodes, scoring, filtering, and the batch of groups as tensors.

The names here are for packages, such as servers, that ask an episode's policy on behalf of a program. ``misfit`` tells what is
wrong with a ``Sampling`` of a request, ``misnamed`` what is wrong with metric names that a program reports. Importing this
loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_host.lazily import lazily

if TYPE_CHECKING:
    from rlhf_host.data.answer_reader import before_stop
    from rlhf_host.data.chat import encode_prompts, render_prompt
    from rlhf_host.data.codec import ChatCodec
    from rlhf_host.records.metric_names import misnamed
    from rlhf_host.records.sampling import misfit
    from rlhf_host.rollouts.conversation import Call, Plan
    from rlhf_host.rollouts.policy import EpisodePolicy

_HOME = {
    "Call": "rollouts.conversation",
    "ChatCodec": "data.codec",
    "EpisodePolicy": "rollouts.policy",
    "Plan": "rollouts.conversation",
    "before_stop": "data.answer_reader",
    "encode_prompts": "data.chat",
    "misfit": "records.sampling",
    "misnamed": "records.metric_names",
    "render_prompt": "data.chat",
}
"""Name → its module in ``rlhf_host``, imported when the name is first asked for."""

__all__ = [
    "Call",
    "ChatCodec",
    "EpisodePolicy",
    "Plan",
    "before_stop",
    "encode_prompts",
    "misfit",
    "misnamed",
    "render_prompt",
]

__getattr__, __dir__ = lazily(__name__, {name: f"rlhf_host.{home}" for name, home in _HOME.items()})
