"""Weights in a model's files that its class has no place for, such as layers that predict several tokens, value heads and towers:
they are carried, unchanged, into everything that is written of the model.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file

from rlhf_host.errors import UserError
from rlhf_host.models.locations import INDEX

log = logging.getLogger(__name__)

SINGLE = "model.safetensors"
CARRIED = "model-carried.safetensors"
"""File of carried weights beside those of the model."""
LEFT_OUT = "%d quantized tensors (%s ...) are not carried, because %s is written in ordinary types: give a base in 16 bits"


def carry(model: Any, files: Iterable[Path], replaced: Callable[[], Any] | None = None) -> None:
    """Makes the model carry what its class has no place for. The files stay open: a checkpoint may be removed that a run goes on
    from.

    Args:
        replaced: makes a model whose class has a place for what is not carried: the head that a scalar head replaces.
    """
    keys = names_in(files)
    left = keys.keys() - targets(model, keys).keys()
    if left and replaced is not None:
        left -= targets(replaced(), left).keys()
    if _was_quantized(model):
        model._weight_conversions = None  # they would quantize what is written, and its configuration would not say so
        if left:
            log.warning(LEFT_OUT, len(left), min(left), type(model).__name__)
        left = set()
    carried = {key: keys[key] for key in sorted(left)}
    model.carried_weights = lambda: carried  # unlike a dict of open files, a function can be copied with its model


def _was_quantized(model: Any) -> bool:
    """Returns True if loading has made ordinary weights of those in the files."""
    steps = [step for each in getattr(model, "_weight_conversions", None) or () for step in getattr(each, "operations", ())]
    kept = getattr(model.config, "quantization_config", None) is not None
    return not kept and any(hasattr(step, "hf_quantizer") for step in steps)


def carried_by(model: Any) -> dict[str, Any]:
    """Returns name of each carried weight → its file, opened."""
    found: dict[str, Any] = getattr(model, "carried_weights", dict)()
    return found


def write_carried(model: Any, directory: Path) -> dict[str, int]:
    """Writes the file of carried weights, if there are any. Returns their sizes by name."""
    tensors = {name: file.get_tensor(name) for name, file in carried_by(model).items()}
    if tensors:
        save_file(tensors, directory / CARRIED, metadata={"format": "pt"})
    return {name: tensor.nbytes for name, tensor in tensors.items()}


def add_carried(model: Any, directory: Path) -> None:
    """Writes carried weights beside the model's own, and the index of both."""
    if not write_carried(model, directory):
        return
    if (directory / SINGLE).is_file():
        (directory / SINGLE).rename(directory / "model-00001-of-00001.safetensors")
    own = {file: names_in([file]) for file in sorted(directory.glob("model-*.safetensors"))}
    size = sum(opened.get_tensor(name).nbytes for names in own.values() for name, opened in names.items())
    write_index(directory, {name: file.name for file, names in own.items() for name in names}, size)


def write_index(directory: Path, where: dict[str, str], size: int) -> None:
    index = {"metadata": {"total_size": size}, "weight_map": where}
    (directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", "utf-8")


def names_in(files: Iterable[Path]) -> dict[str, Any]:
    """Returns name of each weight → its file, opened. Raises ``UserError`` for two different weights of one name."""
    found: dict[str, Any] = {}
    for handle in [safe_open(file, "pt") for file in files]:
        for name in handle.keys():  # noqa: SIM118
            other = found.setdefault(name, handle)
            if other is not handle and not other.get_tensor(name).double().equal(handle.get_tensor(name).double()):
                raise UserError(f"two of its files have a weight {name}, with different values: take one of them out")
    return found


def targets(model: Any, names: Iterable[str]) -> dict[str, str]:
    """Returns name in the files → name of the model's weight or buffer that it becomes, or a part of. Names without a place in
    the model are left out.

    Raises ``UserError`` if two become the same: only one of them could be read.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    conversions: list[Any] = getattr(model, "_weight_conversions", None) or get_model_conversion_mapping(model)
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
            found[key] = name
            if part is None and (other := whole.setdefault(name, key)) != key:
                raise UserError(f"{other} and {key} in its files are both {name}: take one of them out")
    return found
