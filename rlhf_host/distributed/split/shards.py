"""A model's files, written by every process: each keeps and writes its share of the weights, and the first the rest."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from rlhf_host.models.carried import CARRIED, write_carried, write_index
from rlhf_host.models.loading import without_bars
from rlhf_host.protocols import Ranks, Writer

_BLOCK = re.compile(r".*?\.\d+(?=\.)")


def saved_bytes(model: nn.Module) -> dict[str, int]:
    """Returns the size of every weight that a file of the model has, by its name: a tied weight once, as transformers reads it."""
    wanted = set(model.state_dict()) - set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    tied = getattr(model, "all_tied_weights_keys", {})
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    names: dict[Any, list[str]] = {}
    for name, tensor in tensors.items():
        if name in wanted:
            names.setdefault(tensor, []).append(name)
    main = {tensor: min(each, key=lambda name: name in tied) for tensor, each in names.items()}
    return {name: getattr(tensor, "ds_numel", tensor.numel()) * tensor.element_size() for tensor, name in main.items()}


def deal(sizes: Mapping[str, int], processes: int) -> dict[str, int]:
    """Returns the process that writes each weight: block by block, each to the one with the fewest bytes so far.

    A block stays together, because file formats may join its weights.
    """
    blocks: dict[str, list[str]] = {}
    for name in sizes:
        block = _BLOCK.match(name)
        blocks.setdefault(block[0] if block else name, []).append(name)
    totals, owners = [0] * processes, {}
    for names in blocks.values():
        owner = totals.index(min(totals))
        totals[owner] += sum(sizes[name] for name in names)
        owners.update(dict.fromkeys(names, owner))
    return owners


def share_writer(model: Any, directory: Path, share: dict[str, Tensor], ranks: Ranks) -> Writer | None:
    """Returns a function that writes this process's file of a model, and in the first process also the index and all else.
    Collective; what it returns is not. None: there is nothing to write.

    The model loads when every process has written: until then its index names files that are missing.

    Args:
        share: copies in host memory, dealt by ``deal``.
    """
    from transformers.core_model_loading import revert_weight_conversion

    share = revert_weight_conversion(model, share) if share else share
    shares: list[dict[str, int]] = ranks.gather({name: tensor.nbytes for name, tensor in share.items()})
    own, full = ranks.process, [number for number, sizes in enumerate(shares) if sizes]
    files = {number: f"model-{place:05d}-of-{len(full):05d}.safetensors" for place, number in enumerate(full, 1)}

    def write() -> None:
        directory.mkdir(parents=True, exist_ok=True)
        if own == 0:
            rest = directory / ".rest"
            with without_bars():  # aside, because it removes shards that it did not write
                model.save_pretrained(rest, state_dict={})
            for file in rest.iterdir():
                file.rename(directory / file.name)
            rest.rmdir()
            where = {name: files[number] for number in full for name in shares[number]}
            carried = write_carried(model, directory)
            total = sum(sum(sizes.values()) for sizes in (*shares, carried))
            write_index(directory, where | dict.fromkeys(carried, CARRIED), total)
        if own in files:
            tensors = {name: tensor.contiguous() for name, tensor in share.items()}
            save_file(tensors, directory / files[own], metadata={"format": "pt"})

    return write if own == 0 or own in files else None
