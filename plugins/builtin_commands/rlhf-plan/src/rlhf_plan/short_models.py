"""Models of the same shape with fewer layers and made-up weights, written for dry steps: nothing of the real weights is read."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig

from rlhf_host import UserError
from rlhf_host.internals import blocks_of, find_model, load_tokenizer, meta_model
from rlhf_host.settings import RoleConfig

LONGEST_PERIOD = 6
"""Layers after which the kinds of layers may repeat."""
SPREAD = 0.02
"""Standard deviation of made-up weights."""


@dataclass(frozen=True, slots=True)
class Layers:
    """The layers of a model."""

    count: int
    period: int
    """Layers after which their kinds repeat: 1 where all are alike."""

    def depths(self) -> Sequence[int]:
        """Returns the numbers of layers of the models that are timed: the whole one, or two from which it follows."""
        if self.count <= max(4, 2 * self.period):
            return [self.count]
        return [self.period, 5 * self.period if self.count >= 10 * self.period else 3 * self.period]


def layers_of(role: RoleConfig, head: Literal["lm", "scalar"]) -> Layers:
    """Returns the layers of a role's model.

    Raises:
        UserError: it cannot be made from its config.json, or its layers differ in an order that does not repeat.
    """
    kinds = _kinds(_outline(role, head))
    for period in range(1, min(LONGEST_PERIOD, len(kinds)) + 1):
        if all(kinds[place] == kinds[place - period] for place in range(period, len(kinds))):
            return Layers(len(kinds), period)
    raise UserError(
        f"no time can be predicted for {role.model!r}: its {len(kinds)} layers are of {len(set(kinds))} kinds in an order that does"
        " not repeat, so that a few of them do not stand for all"
    )


def write_configuration(role: RoleConfig, head: Literal["lm", "scalar"], depth: int, place: Path) -> Any:
    """Writes the configuration with ``depth`` of the layers, and returns its model without weights.

    Raises:
        UserError: the first layers of the model cannot be made alone.
    """
    whole = _outline(role, head)
    config = copy.deepcopy(whole.config)
    for part in {id(each): each for each in (config, config.get_text_config())}.values():
        _shorten(part, len(_kinds(whole)), depth)
    place.mkdir(parents=True)
    config.save_pretrained(place)
    short = _outline(role.model_copy(update={"model": str(place), "revision": None}), head)
    if _kinds(short) != _kinds(whole)[:depth]:
        raise UserError(
            f"no time can be predicted for {role.model!r}: with num_hidden_layers {depth} its configuration makes other layers"
            " than the first of the whole model"
        )
    return short


def write_short(role: RoleConfig, head: Literal["lm", "scalar"], depth: int, place: Path) -> None:
    """Writes a directory with such a model, made-up weights, and the tokenizer. Raises ``UserError`` as the former."""
    short = write_configuration(role, head, depth, place)
    short.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in short.parameters():
            if weight.dim() < 2:
                weight.fill_(1.0)
            else:
                weight.normal_(0.0, SPREAD, generator=generator)
    short.save_pretrained(place)
    load_tokenizer(role).save_pretrained(place)


def weights_of_short(role: RoleConfig, head: Literal["lm", "scalar"], depth: int) -> int:
    """Returns the number of weights of such a model."""
    whole = _outline(role, head)
    blocks = [sum(weight.numel() for weight in block.parameters()) for block in blocks_of(whole).values()]
    return sum(weight.numel() for weight in whole.parameters()) - sum(blocks[depth:])


def _outline(role: RoleConfig, head: Literal["lm", "scalar"]) -> Any:
    lone = RoleConfig(model=role.model, revision=role.revision, trust_remote_code=role.trust_remote_code)
    if find_model(lone.model, weights=False).gguf:
        raise UserError(f"{role.model} is a GGUF file: give the directory of the model that it was made from")
    model = meta_model(lone, head=head, trainable=True, weights=False)
    if model is None or not blocks_of(model):
        raise UserError(f"no time can be predicted for {role.model!r}: it cannot be made from its config.json alone")
    return model


def _kinds(model: Any) -> list[Any]:
    """Returns a value for each layer, equal where layers are alike."""
    blocks = blocks_of(model).values()
    types = getattr(model.config.get_text_config(), "layer_types", None) or [None] * len(blocks)
    shapes = (tuple((name, weight.shape) for name, weight in block.named_parameters()) for block in blocks)
    return [(type(block), shape, kind) for block, shape, kind in zip(blocks, shapes, types, strict=True)]


def _shorten(config: AutoConfig, count: int, depth: int) -> None:
    """Sets the number of layers, and cuts lists with an entry for each."""
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == count and count > 1:
            setattr(config, name, value[:depth])
    config.num_hidden_layers = depth
