"""Rollouts: episodes, scoring, filtering, and the batch of groups as tensors.

The names here are for packages, such as servers, that ask an episode's policy on behalf of a program. ``misfit`` tells what is
wrong with a ``Sampling`` of a request, ``misnamed`` what is wrong with metric names that a program reports. Importing this
loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_host.lazily import lazily

if TYPE_CHECKING:
    from rlhf_host.data.answer_reader import before_stop as before_stop
    from rlhf_host.data.chat import encode_prompts as encode_prompts
    from rlhf_host.data.chat import render_prompt as render_prompt
    from rlhf_host.data.codec import ChatCodec as ChatCodec
    from rlhf_host.records.metric_names import misnamed as misnamed
    from rlhf_host.records.sampling import misfit as misfit
    from rlhf_host.rollouts.conversation import Call as Call
    from rlhf_host.rollouts.conversation import Plan as Plan
    from rlhf_host.rollouts.policy import EpisodePolicy as EpisodePolicy

__getattr__, __dir__, __all__ = lazily(__name__)
