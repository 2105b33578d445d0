"""Models: loading, merging and writing them; forward passes, heads, and token log-probabilities without the full logits.

The names here are for packages that load or write models. Importing this loads no torch; the first name used does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_host.lazily import lazily

if TYPE_CHECKING:
    from rlhf_host.models.adapter_files import is_adapter
    from rlhf_host.models.loading import head_of, load_model, load_tokenizer, save_model
    from rlhf_host.models.merging import merge
    from rlhf_host.models.places import hub_answers

_HOME = {
    "head_of": "models.loading",
    "hub_answers": "models.places",
    "is_adapter": "models.adapter_files",
    "load_model": "models.loading",
    "load_tokenizer": "models.loading",
    "merge": "models.merging",
    "save_model": "models.loading",
}
"""Name → its module in ``rlhf_host``, imported when the name is first asked for."""

__all__ = [
    "head_of",
    "hub_answers",
    "is_adapter",
    "load_model",
    "load_tokenizer",
    "merge",
    "save_model",
]


__getattr__ = lazily(__name__, {name: f"rlhf_host.{home}" for name, home in _HOME.items()})


def __dir__() -> list[str]:
    return __all__
