"""Models: loading and writing them; forward passes, heads, and token log-probabilities without the full logits.

The names here are for packages that load or write models. Importing this loads no torch; the first name used does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_host.lazily import lazily

if TYPE_CHECKING:
    from rlhf_host.data.templates import tells_the_day
    from rlhf_host.models.adapter_files import is_adapter, refuse_other_base
    from rlhf_host.models.loading import (
        head_of,
        load_model,
        load_tokenizer,
        model_directory,
        quiet_transformers,
        save_model,
        save_tokenizer,
        stop_tokens,
        weight_files,
    )
    from rlhf_host.models.places import hub_answers, with_base
    from rlhf_host.models.quantized import widen
    from rlhf_host.models.room import container_memory, machine_memory

_HOME = {
    "container_memory": "models.room",
    "head_of": "models.loading",
    "hub_answers": "models.places",
    "is_adapter": "models.adapter_files",
    "load_model": "models.loading",
    "load_tokenizer": "models.loading",
    "machine_memory": "models.room",
    "model_directory": "models.loading",
    "quiet_transformers": "models.loading",
    "refuse_other_base": "models.adapter_files",
    "save_model": "models.loading",
    "save_tokenizer": "models.loading",
    "stop_tokens": "models.loading",
    "tells_the_day": "data.templates",
    "weight_files": "models.loading",
    "widen": "models.quantized",
    "with_base": "models.places",
}
"""Name → its module in ``rlhf_host``, imported when the name is first asked for."""

__all__ = [
    "container_memory",
    "head_of",
    "hub_answers",
    "is_adapter",
    "load_model",
    "load_tokenizer",
    "machine_memory",
    "model_directory",
    "quiet_transformers",
    "refuse_other_base",
    "save_model",
    "save_tokenizer",
    "stop_tokens",
    "tells_the_day",
    "weight_files",
    "widen",
    "with_base",
]

__getattr__, __dir__ = lazily(__name__, {name: f"rlhf_host.{home}" for name, home in _HOME.items()})
