"""Models: loading, merging and writing them; forward passes, heads, and token log-probabilities without the full logits.

The names here are for packages that load or write models. Importing this loads no torch; the first name used does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_host.lazily import lazily

if TYPE_CHECKING:
    from rlhf_host.data.templates import tells_the_day
    from rlhf_host.models.adapter_files import is_adapter
    from rlhf_host.models.loading import (
        head_of,
        load_model,
        load_tokenizer,
        model_directory,
        quiet_transformers,
        save_model,
        save_tokenizer,
        stop_tokens,
    )
    from rlhf_host.models.merging import merge
    from rlhf_host.models.places import hub_answers
    from rlhf_host.models.room import container_memory, machine_memory

_HOME = {
    "container_memory": "models.room",
    "head_of": "models.loading",
    "hub_answers": "models.places",
    "is_adapter": "models.adapter_files",
    "load_model": "models.loading",
    "load_tokenizer": "models.loading",
    "machine_memory": "models.room",
    "merge": "models.merging",
    "model_directory": "models.loading",
    "quiet_transformers": "models.loading",
    "save_model": "models.loading",
    "save_tokenizer": "models.loading",
    "stop_tokens": "models.loading",
    "tells_the_day": "data.templates",
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
    "merge",
    "model_directory",
    "quiet_transformers",
    "save_model",
    "save_tokenizer",
    "stop_tokens",
    "tells_the_day",
]

__getattr__, __dir__ = lazily(__name__, {name: f"rlhf_host.{home}" for name, home in _HOME.items()})
