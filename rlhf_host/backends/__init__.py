"""Optimizer steps.

The names here are for packages with a backend: optimizers by name, schedules, pieces of weights, a pass through a module that
splits them, memory that waits on the host, and a model's files by every rank. They are provisional. Importing this loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_host.lazily import lazily

if TYPE_CHECKING:
    from rlhf_host.backends.optimizers import arguments_of, check_optimizer, make_optimizer, state_bytes
    from rlhf_host.backends.packed import run_through
    from rlhf_host.backends.parking import Parking, Parks, distinct
    from rlhf_host.backends.shards import deal, saved_bytes, share_writer
    from rlhf_host.backends.torch_backend import decayed_groups, learning_rate
    from rlhf_host.backends.weights import merged_units, named_buffers, pieces
    from rlhf_host.models.adapters import has_adapters, merged_weights
    from rlhf_host.models.loading import copy_model
    from rlhf_host.models.quantized import is_quantized

_HOME = {
    "Parking": "backends.parking",
    "Parks": "backends.parking",
    "arguments_of": "backends.optimizers",
    "check_optimizer": "backends.optimizers",
    "copy_model": "models.loading",
    "deal": "backends.shards",
    "decayed_groups": "backends.torch_backend",
    "distinct": "backends.parking",
    "has_adapters": "models.adapters",
    "is_quantized": "models.quantized",
    "learning_rate": "backends.torch_backend",
    "make_optimizer": "backends.optimizers",
    "merged_units": "backends.weights",
    "merged_weights": "models.adapters",
    "named_buffers": "backends.weights",
    "pieces": "backends.weights",
    "run_through": "backends.packed",
    "saved_bytes": "backends.shards",
    "share_writer": "backends.shards",
    "state_bytes": "backends.optimizers",
}
"""Name → its module in ``rlhf_host``, imported when the name is first asked for."""

__all__ = [
    "Parking",
    "Parks",
    "arguments_of",
    "check_optimizer",
    "copy_model",
    "deal",
    "decayed_groups",
    "distinct",
    "has_adapters",
    "is_quantized",
    "learning_rate",
    "make_optimizer",
    "merged_units",
    "merged_weights",
    "named_buffers",
    "pieces",
    "run_through",
    "saved_bytes",
    "share_writer",
    "state_bytes",
]

__getattr__, __dir__ = lazily(__name__, {name: f"rlhf_host.{home}" for name, home in _HOME.items()})
