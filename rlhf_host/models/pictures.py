"""Pictures in a model's passes: the tower runs once for each picture of a pass, whatever rows have it.

transformers' own forward of the model does everything else: it puts features in the places of placeholder tokens, builds its
masks, and hands features to deeper layers where a family does that. It gets features that were computed before
(``mm_encoder_outputs``), in the order of the layout's placeholders, and positions by its own function (``get_rope_index``).
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import transformers
from torch import Tensor

from rlhf_host.data.processor import Processor
from rlhf_host.errors import RunError, UserError
from rlhf_host.models.layouts import Layout, Places, rows_in
from rlhf_host.records.pictures import Picture, Shown, pillow, png, positions_of

FIRST = "5.18"
"""The first version of transformers that takes features of pictures which were computed before."""
TYPES = ("mm_token_type_ids", "token_type_ids")
"""Names under which models take 1 at placeholders of pictures and 0 at other tokens."""
_UNUSED = ("last_hidden_state", "hidden_states", "attentions")
"""Outputs of a tower beside features."""


class Reader(Protocol):
    """Methods of ``data.processor.Processor`` that passes need."""

    def tokens(self, picture: Picture) -> Sequence[int]:
        """Returns the tokens that stand for a picture."""

    def tensors(self, pictures: Sequence[Picture]) -> Mapping[str, Tensor]:
        """Returns what the tower takes for these pictures."""


def placeholder_of(config: Any) -> int | None:
    """Returns the token of a model's configuration whose places get the features of pictures; None: it sees none."""
    found = (getattr(config, name, None) for name in ("image_token_id", "image_token_index"))
    return next((token for token in found if isinstance(token, int)), None)


def base_of(module: Any) -> Any:
    """Returns the part of a model that turns tokens and pictures into hidden states.

    Raises ``UserError`` if the model has none that takes features computed before.
    """
    base, name = module.base_model, type(module).__name__
    takes = inspect.signature(base.forward).parameters if base is not module else {}
    if not hasattr(base, "get_image_features") or "mm_encoder_outputs" not in takes:
        raise UserError(
            f"{name} takes no pictures here: transformers {transformers.__version__} gives it no way to compute them once"
            f" (most families have one from {FIRST} on)"
        )
    if odd := [each for each in takes if each.endswith("token_type_ids") and each not in TYPES]:
        raise UserError(f"{name} takes no pictures here: it needs {odd[0]}, which only its own processor makes")
    return base


@dataclass(frozen=True, slots=True)
class Seen:
    """The pictures of a line of rows, each of them once."""

    tensors: Mapping[str, Tensor]
    """Tensors that the tower takes for them, in order."""
    numbers: Mapping[Picture, int]
    tokens: Sequence[Sequence[int]]
    """The tokens that stand for each picture."""
    starts: Sequence[int]
    """The first feature of each picture, and last the number of all."""
    placeholder: int


@dataclass(frozen=True, slots=True)
class Sight:
    """A model's way to see pictures."""

    base: Any
    reader: Reader
    placeholder: int

    @classmethod
    def of(cls, model: Any, reader: Reader | None = None) -> Sight:
        """Returns the sight of a model.

        Args:
            reader: default: the processor beside the model's files.

        Raises ``UserError`` if it takes no pictures, or has no processor for them.
        """
        base, placeholder = base_of(model), placeholder_of(model.config)
        if placeholder is None:
            raise UserError(f"{type(model).__name__} takes no pictures: its configuration names no token for them")
        return cls(base, Processor.at(model.config.name_or_path) if reader is None else reader, placeholder)

    def words(self, ids: Sequence[int]) -> list[int]:
        """Returns tokens with another one in place of each placeholder."""
        return [token if token != self.placeholder else (token or 2) - 1 for token in ids]

    def see(self, images: Sequence[Sequence[Shown]]) -> Seen:
        """Returns the distinct pictures of rows, ready for the tower. Without any it is a blank one, so that the tower runs in
        every pass.
        """
        pictures = dict.fromkeys(picture for own in images for _, picture in own) or [blank()]
        numbers = {picture: number for number, picture in enumerate(pictures)}
        tokens = [self.reader.tokens(picture) for picture in numbers]
        starts = [0, *itertools.accumulate(list(own).count(self.placeholder) for own in tokens)]
        return Seen(self.reader.tensors(list(numbers)), numbers, tokens, starts, self.placeholder)

    def placed(self, layout: Layout, images: Sequence[Sequence[Shown]], *, seen: Seen) -> Layout:
        """Returns the layout with the places of its rows' pictures, and with positions where the model has its own.

        Args:
            images: the pictures of each row, in order, each after a place before which its tokens are not.

        Raises:
            RunError: a row's tokens do not have as many placeholders as its pictures need.
        """
        rows = rows_in(layout)
        width = layout.input_ids.shape[1] if layout.rows is None else layout.rows.length
        table = torch.full((len(rows), width), -1)
        axes = torch.arange(width).expand(3, len(rows), width).clone()
        counted = True
        for row, (ids, own) in enumerate(zip(rows, images, strict=True)):
            table[row, : len(ids)] = features = _features(ids, own, seen, row)
            if (positions := _positions(self.base, ids, own, features, seen)) is not None:
                axes[:, row, : len(ids)], counted = positions, False
        if layout.rows is not None:
            table = table.flatten()[layout.rows.back][None]
            axes = axes.flatten(1)[:, layout.rows.back][:, None]
        types = ((table >= 0) & (table < seen.starts[-1])).int()
        places = Places(seen, table[table >= 0], types)
        return replace(layout, position_ids=layout.position_ids if counted else axes, pictures=places)

    def by_itself(self, layout: Layout, images: Sequence[Shown]) -> Layout:
        """Returns the layout of one row that the model computes as plain transformers does, pictures and positions included."""
        types = (layout.input_ids == self.placeholder).int()
        alone = self.reader.tensors([picture for _, picture in images]) if images else {}
        alone = {**alone, "attention_mask": torch.ones_like(layout.input_ids)}
        return replace(layout, pictures=Places(None, torch.zeros(0, dtype=torch.int64), types, alone))


def _takes(base: Any, method: str) -> frozenset[str]:
    """Returns the names of the parameters of a model's method."""
    kind: Any = type(base)
    return _parameters(kind, method)


@functools.cache
def _parameters(kind: Any, method: str) -> frozenset[str]:
    return frozenset(inspect.signature(getattr(kind, method)).parameters)


@functools.cache
def blank() -> Picture:
    """Returns the picture of passes that have none, while others have."""
    return noise(0)


@functools.cache
def noise(seed: int) -> Picture:
    """Returns a small picture of random colours, the same for the same seed; those of odd and even seeds differ in their form."""
    size = (64, 48) if seed % 2 else (48, 64)
    colours = torch.randint(256, (size[1], size[0], 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return Picture.of_bytes(png(pillow().fromarray(colours.numpy())))


def first_pictures(ids: Sequence[int], images: Sequence[Shown], seen: Seen) -> Sequence[Shown]:
    """Returns those of a row's pictures whose tokens are in its beginning ``ids``."""
    return images[: len(_token_positions(ids, images, seen))]


def _token_positions(ids: Sequence[int], images: Sequence[Shown], seen: Seen) -> list[int]:
    """Returns where the tokens of each picture begin, up to the first that is not there."""
    tokens = [seen.tokens[seen.numbers[picture]] for _, picture in images]
    return positions_of(ids, tokens, [begin for begin, _ in images])


def features_of(base: Any, seen: Seen, device: torch.device) -> Any:
    """Runs the tower over the pictures. Returns what transformers' ``get_image_features`` returns."""
    takes = _takes(base, "get_image_features")
    tensors = {name: _typed(base, value, device) for name, value in seen.tensors.items() if name in takes}
    return base.get_image_features(**tensors, return_dict=True)


def _typed(base: Any, value: Tensor, device: torch.device) -> Tensor:
    """Returns what a processor made, on a device, in the type of the model's weights: not all towers cast it."""
    dtype = base.get_input_embeddings().weight.dtype if value.is_floating_point() else value.dtype
    return value.to(device, dtype, non_blocking=True)


def inputs(base: Any, layout: Layout, features: Any) -> dict[str, Any]:
    """Returns the keyword arguments for the model, for a layout with pictures.

    Args:
        features: as ``features_of`` returns them.
    """
    places = layout.pictures
    assert places is not None
    takes = _takes(base, "forward")
    given = layout.inputs() | {name: places.types for name in TYPES if name in takes}
    if places.alone is not None:
        return given | {name: _typed(base, value, layout.input_ids.device) for name, value in places.alone.items()}
    embedding = base.get_input_embeddings()(layout.input_ids.new_tensor([places.seen.placeholder]))
    order, total = places.features, places.seen.starts[-1]
    ordered = {
        name: _reordered(value, order, total, embedding if name == "pooler_output" else torch.zeros_like(embedding))
        for name, value in features.items()
        if name not in _UNUSED
    }
    return given | {"mm_encoder_outputs": {"image": type(features)(**ordered)}}


def _reordered(value: Any, order: Tensor, total: int, last: Tensor) -> Any:
    """Returns features in another order.

    Args:
        value: ``total`` features as a tower gives them: a tensor, a tensor for each picture, or all of them for each of several
            layers.
        last: ``[1, H]``: one more feature, of placeholders that stand for no picture.
    """
    if isinstance(value, Tensor):
        flat = value.reshape(total, value.shape[-1])
        ordered = torch.cat([flat, last.to(flat)]).index_select(0, order)
        in_blocks = value.dim() == 3 and len(ordered) % value.shape[1] == 0  # of equally many features for each picture
        return ordered.view(-1, *value.shape[1:]) if in_blocks else ordered
    if isinstance(value, list | tuple) and value:
        if _adds_up(value, total):
            flat = torch.cat([each.reshape(-1, each.shape[-1]) for each in value])
            return type(value)([_reordered(flat, order, total, last)])
        return type(value)([_reordered(each, order, total, last) for each in value])
    return value


def _adds_up(values: Sequence[Any], total: int) -> bool:
    """Returns True for one tensor of features for each picture, and False for all features at each of several depths."""
    return all(isinstance(each, Tensor) for each in values) and sum(each.numel() // each.shape[-1] for each in values) == total


def _features(ids: Sequence[int], images: Sequence[Shown], seen: Seen, row: int) -> Tensor:
    """Returns ``[L]``: the feature of each token, -1 at others. A placeholder that the policy itself sampled, or an agent wrote,
    stands for no picture; its feature is the last one, beyond those of pictures.
    """
    tokens = torch.tensor(ids, dtype=torch.int64)
    features = torch.where(tokens == seen.placeholder, seen.starts[-1], -1)
    places = _token_positions(ids, images, seen)
    if len(places) < len(images):
        number = len(places)
        raise RunError(
            f"row {row} has {len(images)} pictures, and the {len(seen.tokens[seen.numbers[images[number][1]]])} tokens of picture"
            f" {number + 1} are not in it: rows keep the tokens of their pictures whole"
        )
    for place, (_, picture) in zip(places, images, strict=True):
        number = seen.numbers[picture]
        own = tokens[place : place + len(seen.tokens[number])]
        at = place + (own == seen.placeholder).nonzero().squeeze(-1)
        features[at] = torch.arange(seen.starts[number], seen.starts[number + 1])
    return features


def _positions(base: Any, ids: Sequence[int], images: Sequence[Shown], features: Tensor, seen: Seen) -> Tensor | None:
    """Returns ``[3, L]``: a row's positions by the model's own function; None: they count up."""
    find = getattr(base, "get_rope_index", None)
    if find is None or not images:
        return None
    numbers = [seen.numbers[picture] for _, picture in images]
    takes = _takes(base, "get_rope_index")
    given = {name: value[numbers] for name, value in seen.tensors.items() if name in takes and len(value) == len(seen.numbers)}
    types = ((features >= 0) & (features < seen.starts[-1])).int()[None]
    given |= {name: types for name in TYPES if name in takes}
    positions: Tensor = find(torch.tensor([ids]), **given)[0]
    return positions[:, 0]
