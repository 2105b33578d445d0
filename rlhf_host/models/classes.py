"""Classes of models: transformers' language models, those that see pictures, and those with a scalar head."""

from __future__ import annotations

import functools
from typing import Any

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
)
from transformers.conversion_mapping import (
    USER_REGISTERED_MAPPINGS,
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
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
    sees = _seeing_class(config)
    if head == "lm":
        return AutoModelForCausalLM if sees is None else AutoModelForImageTextToText
    if type(config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        return AutoModelForSequenceClassification
    if sees is None and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForSequenceClassification
    causal: Any = sees or MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if type(config) not in MODEL_MAPPING or not hasattr(config.get_text_config(), "hidden_size"):
        raise UserError(
            f"{causal.__name__} cannot have a scalar head: transformers does not build its decoder alone, or its width is not"
            " known; take a model of another family for this role"
        )
    return _scalar_class(causal)


def _seeing_class(config: PreTrainedConfig) -> Any:
    """Returns transformers' class of models that see, if this is such a model; None for others, and for the language model alone
    of such a family.
    """
    if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return None
    found: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    named = (config.architectures or [found.__name__])[0]
    return None if named != found.__name__ and type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else found


@functools.cache
def _scalar_class(causal: Any) -> Any:
    """Returns a sequence classification model, for language models for which transformers has none."""
    base = next(parent for parent in causal.__mro__ if parent.__name__.endswith("PreTrainedModel"))
    name = base.__name__.removesuffix("PreTrainedModel") + "ForSequenceClassification"
    if name not in USER_REGISTERED_MAPPINGS and (files := get_checkpoint_conversion_mapping(causal.__name__)) is not None:
        register_checkpoint_conversion_mapping(name, files)  # a model that sees may have other names in its files
    named = {"base_model_prefix": causal.base_model_prefix, "config_class": causal.config_class, "__module__": __name__}
    return type(name, (GenericForSequenceClassification, base), named)
