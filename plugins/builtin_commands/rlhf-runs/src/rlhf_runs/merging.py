"""Merging of a LoRA adapter and its base into one model, which is then compared with the two."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_host import RunError, UserError
from rlhf_host.comparison import beyond, random_text
from rlhf_host.models import (
    head_of,
    is_adapter,
    load_model,
    load_tokenizer,
    quiet_transformers,
    refuse_other_base,
    save_model,
    save_tokenizer,
    weight_files,
    widen,
    with_base,
)
from rlhf_host.settings import RoleConfig

PROBE = (2, 64)
"""Rows and tokens of the probe."""
TOLERANCE = {"float32": 1e-5, "bfloat16": 5e-2, "float16": 1e-2}
"""Largest gap of logits, relative to the largest logit; 16-bit types round the merged weights."""


@dataclass(frozen=True, slots=True)
class Merged:
    """Comparison of the written model with the base and the adapter beside it, both computed in float32 on a probe."""

    dtype: str
    """Type of the written weights."""
    gap: float
    """Largest difference of logits; of scores, with a scalar head."""
    size: float
    """Largest logit."""

    def __str__(self) -> str:
        compared = f"logits differ by at most {self.gap:.1e} from those of the base with its adapter (largest: {self.size:.3g})"
        return f"{self.dtype}, {compared}"

    def check(self, output: Path) -> None:
        """Raises ``RunError`` if the written model computes something else."""
        if not self.gap <= TOLERANCE[self.dtype] * self.size:
            apart = beyond(self.gap, TOLERANCE[self.dtype] * self.size)
            raise RunError(f"{output} does not compute what its adapter does (by {apart}): {self}")


def merge(directory: Path, base: str | None, output: Path, dtype: str | None) -> Merged:
    """Writes the merged model and its tokenizer into the directory ``output``, and reads it again.

    Args:
        base: the model that the adapter was trained on; default: the model that the adapter names.
        dtype: type of the written weights; default: that of the base.

    Raises:
        UserError: the directory has no adapter, or it was not trained on ``base``.
    """
    if not is_adapter(directory):
        raise UserError(f"{directory} has no adapter: its model is whole already")
    role = RoleConfig(model=base, adapter=str(directory)) if base else with_base(RoleConfig(model=str(directory)))
    role = role.model_copy(update={"device": "cpu", "dtype": dtype or "auto"})
    refuse_other_base(directory, str(role.model), weight_files(role))
    head = head_of(directory)
    model = load_model(role, head=head)
    with quiet_transformers():
        save_model(model, output)
        save_tokenizer(load_tokenizer(role), output)
    written = str(next(model.parameters()).dtype).removeprefix("torch.")
    merged = _logits(load_model(RoleConfig(model=str(output), dtype="float32", device="cpu"), head=head))
    trained = widen(load_model(role.model_copy(update={"dtype": "auto"}), head=head, trainable=True))
    for weight in trained.parameters():
        weight.data = weight.data.float()  # not the buffers: tables of positions are as they were
    beside = _logits(trained)
    return Merged(written, float((merged - beside).abs().max()), float(beside.abs().max()))


@torch.no_grad()
def _logits(model: Any) -> Tensor:
    count, length = PROBE
    ids = random_text(model.config.get_text_config(), count * length, torch.Generator().manual_seed(0))
    logits: Tensor = model(input_ids=torch.tensor(ids).view(count, length), use_cache=False).logits
    return logits
