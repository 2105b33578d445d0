"""Names for packages that compare what they compute with the plain path, as kernels do: made-up rows, a model's hidden states for
them, log-probabilities of a head, what is wrong with a decoder, and how far results may lie apart. Importing this loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_host.lazily import lazily

if TYPE_CHECKING:
    from rlhf_host.engines.plain_path import decoder_problem as decoder_problem
    from rlhf_host.errors import beyond as beyond
    from rlhf_host.models.layout_check import EXACT as EXACT
    from rlhf_host.models.layout_check import ROUGH as ROUGH
    from rlhf_host.models.layout_check import WIDE as WIDE
    from rlhf_host.models.layout_check import example_layouts as example_layouts
    from rlhf_host.models.layout_check import hidden_states as hidden_states
    from rlhf_host.models.layout_check import random_text as random_text
    from rlhf_host.models.layout_check import structure as structure
    from rlhf_host.models.logprobs import token_logprobs as token_logprobs
    from rlhf_host.models.precision import without_tf32 as without_tf32

__getattr__, __dir__, __all__ = lazily(__name__)
