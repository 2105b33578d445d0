"""Engines, which generate tokens: the protocol, and the embedded engine on transformers.

The names here are for packages with an engine: requests and their checks, tokens that end a completion, and loading of weights.
They are provisional. Importing this loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_host.lazily import lazily

if TYPE_CHECKING:
    from rlhf_host.engines.loading import ModuleLoader as ModuleLoader
    from rlhf_host.engines.loading import call_by_path as call_by_path
    from rlhf_host.engines.loading import copy_weights as copy_weights
    from rlhf_host.engines.requests import Request as Request
    from rlhf_host.engines.requests import check_request as check_request
    from rlhf_host.engines.requests import end_tokens as end_tokens

__getattr__, __dir__, __all__ = lazily(__name__)
