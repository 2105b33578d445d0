"""Frozen weights kept in 4 bits by bitsandbytes, as under the adapters of QLoRA (arXiv:2305.14314)."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from rlhf_host.errors import UserError, a
from rlhf_host.models.dtypes import written_type
from rlhf_host.plugins.libraries import require_library


def settings(device: torch.device) -> dict[str, Any]:
    """Returns settings for ``from_pretrained``: linear maps in NF4, with their constants quantized too, on this device.

    Raises:
        UserError: bitsandbytes is not installed.
    """
    require_library("bitsandbytes", "weights in 4 bits")
    from transformers import BitsAndBytesConfig

    kind = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    return {"quantization_config": kind, "device_map": {"": device}}


def is_quantized(model: Any) -> bool:
    return bool(getattr(model, "is_loaded_in_4bit", False))


def layers(model: nn.Module) -> dict[str, Any]:
    """Returns the linear maps in 4 bits, by each of their names."""
    if not is_quantized(model):
        return {}
    from bitsandbytes.nn import Linear4bit

    modules = model.named_modules(remove_duplicate=False)
    return {name: module for name, module in modules if isinstance(module, Linear4bit)}


def prepare(model: nn.Module) -> None:
    """Makes products use the type of all other weights. On CPUs, evaluation mode would pack the weights in a way that has no
    gradients.

    Raises:
        UserError: the model's linear maps are of a kind whose weights could not be passed on.
    """
    dtype = next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    for name, layer in layers(model).items():
        refuse_kind(model, name, getattr(layer, "source_cls", nn.Linear))
        layer.compute_dtype, layer.compute_type_is_set = dtype, True
        layer.support_avx512bf16_for_cpu = False


def refuse_kind(model: Any, name: str, kind: type) -> None:
    """Raises ``UserError`` for a linear map of a kind whose weights in 4 bits could not be passed on."""
    if kind is not nn.Linear:
        raise UserError(f"{type(model).__name__} cannot be in 4 bits: {name} is {a(kind.__name__)}, not a Linear (quantize)")


def widen(model: Any) -> Any:
    """Gives the model ordinary weights, in place, as its products used them."""
    if is_quantized(model):
        narrow = layers(model)
        model.dequantize()
        for name, layer in narrow.items():  # transformers widens into the type of the model, products into that of the layer
            model.get_submodule(name).weight.data = plain_weight(layer)
        model.is_loaded_in_4bit = False
    return model


def widened(model: Any) -> Any:
    """Returns a model with ordinary weights: a copy, or the model itself if it has them."""
    return widen(copy.deepcopy(model)) if is_quantized(model) else model


def plain_config(model: Any) -> Any:
    """Returns the model's configuration without 4 bits."""
    config = copy.deepcopy(model.config)
    if is_quantized(model):
        del config.quantization_config
    return config


def plain_weight(layer: Any) -> Any:
    """Returns a linear map's weight as its products use it."""
    if not hasattr(layer, "quant_state"):
        return layer.weight
    from bitsandbytes.functional import dequantize_4bit

    wide = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    return wide.to(written_type(layer.weight, layer.compute_dtype))
