"""Classes of models: transformers' language models, and those with a scalar head."""

from __future__ import annotations

import functools
from typing import Any

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
)
from transformers.modeling_layers import GenericForSequenceClassification

from rlhf_host.errors import UserError


def model_class(head: str, config: PreTrainedConfig) -> Any:
    """Returns the class that loads a model of this configuration.

    Args:
        head: ``lm`` or ``scalar``.

    Raises:
        UserError: models of this kind cannot have a scalar head.
    """
    if head == "lm":
        return AutoModelForCausalLM
    if type(config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForSequenceClassification
    causal: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if type(config) not in MODEL_MAPPING or not hasattr(config.get_text_config(), "hidden_size"):
        raise UserError(
            f"{causal.__name__} cannot have a scalar head: transformers does not build its decoder alone, or its width is not"
            " known; take a model of another family for this role"
        )
    return _scalar_class(causal)


@functools.cache
def _scalar_class(causal: Any) -> Any:
    """Returns a sequence classification model, for language models for which transformers has none."""
    base = next(parent for parent in causal.__mro__ if parent.__name__.endswith("PreTrainedModel"))
    name = base.__name__.removesuffix("PreTrainedModel") + "ForSequenceClassification"
    named = {"base_model_prefix": causal.base_model_prefix, "config_class": causal.config_class, "__module__": __name__}
    return type(name, (GenericForSequenceClassification, base), named)
