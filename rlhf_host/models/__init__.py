"""Models: loading and writing them; forward passes, heads, and token log-probabilities without the full logits.

The names here are for packages that load or write models. Importing this loads no torch; the first name used does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_host.lazily import lazily

if TYPE_CHECKING:
    from rlhf_host.data.templates import tells_the_day as tells_the_day
    from rlhf_host.models.adapter_files import is_adapter as is_adapter
    from rlhf_host.models.adapter_files import refuse_other_base as refuse_other_base
    from rlhf_host.models.available_memory import container_memory as container_memory
    from rlhf_host.models.available_memory import machine_memory as machine_memory
    from rlhf_host.models.loading import head_of as head_of
    from rlhf_host.models.loading import load_model as load_model
    from rlhf_host.models.loading import load_tokenizer as load_tokenizer
    from rlhf_host.models.loading import model_directory as model_directory
    from rlhf_host.models.loading import quiet_transformers as quiet_transformers
    from rlhf_host.models.loading import save_model as save_model
    from rlhf_host.models.loading import save_tokenizer as save_tokenizer
    from rlhf_host.models.loading import sizes as sizes
    from rlhf_host.models.loading import stop_tokens as stop_tokens
    from rlhf_host.models.loading import weight_files as weight_files
    from rlhf_host.models.locations import hub_answers as hub_answers
    from rlhf_host.models.locations import with_base as with_base
    from rlhf_host.models.quantized import widen as widen

__getattr__, __dir__, __all__ = lazily(__name__)
