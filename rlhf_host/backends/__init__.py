"""Optimizer steps.

The names here are for packages with a backend: optimizers by name, schedules, pieces of weights, the ranks of one
process. They are provisional. Importing this loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_host.lazily import lazily

if TYPE_CHECKING:
    from rlhf_host.backends.one_process import OneProcess as OneProcess
    from rlhf_host.backends.optimizers import arguments_of as arguments_of
    from rlhf_host.backends.optimizers import check_optimizer as check_optimizer
    from rlhf_host.backends.optimizers import make_optimizer as make_optimizer
    from rlhf_host.backends.optimizers import state_bytes as state_bytes
    from rlhf_host.backends.torch_backend import decayed_groups as decayed_groups
    from rlhf_host.backends.torch_backend import learning_rate as learning_rate
    from rlhf_host.backends.weights import chunked as chunked
    from rlhf_host.models.adapters import has_adapters as has_adapters
    from rlhf_host.models.adapters import merged_weights as merged_weights
    from rlhf_host.models.loading import copy_model as copy_model
    from rlhf_host.models.quantized import is_quantized as is_quantized

__getattr__, __dir__, __all__ = lazily(__name__)
