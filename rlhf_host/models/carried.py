"""Weights in a model's files that its class has no place for, such as layers that predict several tokens, value heads and towers:
they are carried, unchanged, into everything that is written of the model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlhf_host.errors import RunError, UserError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
FIRST = "model-00001-of-00001.safetensors"
CARRIED = "model-carried.safetensors"
"""File of carried weights beside those of the model."""
SHOWN = 3
"""Names in a message."""


class Carried:
    """Weights that a model carries: name → open file, because checkpoints are removed while what began with them goes on."""

    def __init__(self, files: Mapping[str, Any]):
        self._files = dict(files)

    def __deepcopy__(self, _: Any) -> Carried:
        return self

    def __str__(self) -> str:
        return f"{', '.join(list(self._files)[:SHOWN])}{', ...' * (len(self._files) > SHOWN)}"

    def __len__(self) -> int:
        return len(self._files)

    def add_to(self, directory: Path) -> None:
        """Writes them beside a model's weights, and into its index. A file of them that is there, as ``link`` leaves it, stays.

        Raises ``RunError`` if the model has written a weight of the same name.
        """
        index = directory / INDEX
        if not index.is_file():
            (directory / SINGLE).rename(directory / FIRST)
            own = _read(directory / FIRST)
            size = {"total_size": sum(tensor.nbytes for tensor in own.values())}
            index.write_text(json.dumps({"metadata": size, "weight_map": dict.fromkeys(own, FIRST)}))
        listed = json.loads(index.read_text("utf-8"))
        if twice := sorted(listed["weight_map"].keys() & self._files.keys()):
            raise RunError(f"{directory}: {twice[0]} is a weight of the model, and one that it carries: rename it in the base")
        tensors = {name: file.get_tensor(name) for name, file in self._files.items()}
        if not _same(tensors, _read(directory / CARRIED)):
            (directory / CARRIED).unlink(missing_ok=True)  # not written over: another checkpoint may have it too
            save_file(tensors, directory / CARRIED, metadata={"format": "pt"})
        listed["metadata"]["total_size"] += sum(tensor.nbytes for tensor in tensors.values())
        listed["weight_map"] |= dict.fromkeys(tensors, CARRIED)
        index.write_text(json.dumps(listed, indent=2, sort_keys=True) + "\n", "utf-8")


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        return {}
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    kinds = [{name: (tensor.dtype, tensor.shape) for name, tensor in each.items()} for each in (one, other)]
    return kinds[0] == kinds[1] and all(torch.equal(_bits(one[name]), _bits(other[name])) for name in one)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.flatten().view(torch.uint8)


def link(before: Path, directory: Path) -> None:
    """Links the carried weights of an earlier checkpoint of the same model, where there are links: they are on the disk once."""
    with suppress(OSError):
        os.link(before / CARRIED, directory / CARRIED)


def carried_by(model: Any) -> Carried | None:
    carried: Carried | None = getattr(model, "carried_weights", None)
    return carried


def add_carried(model: Any, directory: str | Path) -> None:
    """Writes what a model carries beside its weights."""
    if (carried := carried_by(model)) is not None:
        carried.add_to(Path(directory))


def listed_files(path: str, **options: Any) -> list[Path]:
    """Returns a model's files of weights, as its index names them; ``path`` is a directory or a hub name."""
    from transformers.utils import cached_file

    def find(name: str) -> Path | None:
        found = cached_file(path, name, _raise_exceptions_for_missing_entries=False, **options)
        return None if found is None else Path(found)

    if (index := find(INDEX)) is not None:
        names = json.loads(index.read_text("utf-8"))["weight_map"].values()
        return [find(name) or Path(path, name) for name in dict.fromkeys(names)]
    return list(filter(None, [find(SINGLE)]))


def names_in(files: Iterable[Path]) -> dict[str, Any]:
    """Returns name of each weight → its file, opened."""
    handles = [safe_open(file, "pt") for file in files]
    return {name: handle for handle in handles for name in handle.keys()}  # noqa: SIM118


def targets(model: Any, names: Iterable[str]) -> dict[str, str]:
    """Returns name in the files → name of the model's weight or buffer that it becomes, or a part of. Names without a place in
    the model are left out.

    Raises ``UserError`` if two become the same: only one of them could be read.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    conversions: list[Any] = get_model_conversion_mapping(model, hf_quantizer=getattr(model, "hf_quantizer", None))
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    prefix, own = model.base_model_prefix, model.state_dict()
    found: dict[str, str] = {}
    whole: dict[str, str] = {}
    for key in sorted(names, key=dot_natural_key):
        name, part = rename_source_key(key, renamings, converters, prefix, own)
        if name not in own and key in own:
            name, part = rename_source_key(key, [], [], prefix, own)
        if name in own:
            if part is None and (other := whole.setdefault(name, key)) != key:
                raise UserError(f"{other} and {key} in its files are both {name}: take one of them out")
            found[key] = name
    return found


def carry(model: Any, files: Iterable[Path], *, replaced: Any = None) -> None:
    """Makes the model carry what its class has no place for.

    Args:
        replaced: makes a model whose class has a place for what is not carried: the head that a scalar head replaces.
    """
    keys = names_in(files)
    left = keys.keys() - targets(model, keys).keys()
    if left and replaced is not None:
        left -= targets(replaced(), left).keys()
    if left:
        model.carried_weights = Carried({key: keys[key] for key in sorted(left)})
