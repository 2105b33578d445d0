"""Small models in place of large ones: of the same layers, but few of them."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from rlhf_host.models.heads import blocks_of

NOISE = 0.02
"""Standard deviation of what is added to constant weights, as those of norms: none is then 0 or 1, so that none can be left out
unseen.
"""
PLACE = re.compile(r"idx|index|layer_number|layer_id")
"""Matches the attributes that say which layer a module is in."""


def small_model(
    shell: PreTrainedModel, config: PreTrainedConfig, make: Callable[[PreTrainedConfig], PreTrainedModel]
) -> PreTrainedModel | None:
    """Returns a model with the first layers of another one, as many as there are kinds of layers in it; its weights are random,
    and the same in every process. None if a configuration of fewer layers gives other layers.

    Args:
        shell: the model, perhaps without weights.
        make: makes a model of a configuration.
    """
    layers, text = list(blocks_of(shell).values()), config.get_text_config()
    if not layers or getattr(text, "num_hidden_layers", None) != len(layers):
        return None
    kinds = [(_kind(layer), tuple(value[n] for value in _lists(text, len(layers)).values())) for n, layer in enumerate(layers)]
    count = 1 + max(kinds.index(kind) for kind in kinds)
    small = copy.deepcopy(config)
    cut = small.get_text_config()
    for name, value in _lists(cut, len(layers)).items():
        setattr(cut, name, value[:count])
    cut.num_hidden_layers = count
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        probe = make(small)
        with torch.no_grad():
            for weight in probe.parameters():
                if weight.min() == weight.max():
                    weight.add_(torch.randn(weight.shape, dtype=torch.float32).to(weight.dtype), alpha=NOISE)
    same = [_kind(layer) for layer in blocks_of(probe).values()] == [kind for kind, _ in kinds[:count]]
    return probe if same else None


def _lists(config: Any, length: int) -> dict[str, list[Any]]:
    """Returns the settings that have a value for each layer."""
    return {name: value for name, value in vars(config).items() if isinstance(value, list) and len(value) == length}


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    return type(layer), tuple(_described(layer))


def _described(layer: nn.Module) -> Iterator[Any]:
    for name, module in layer.named_modules():
        plain = {key: value for key, value in vars(module).items() if isinstance(value, bool | int | float | str)}
        yield name, type(module), tuple(item for item in plain.items() if not PLACE.search(item[0]))
    for name, weight in layer.named_parameters():
        yield name, tuple(weight.shape)
