"""OpenRLHF's options whose value or meaning differs from ours."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_translate.openrlhf import ppo, rows
from rlhf_translate.openrlhf.common import BOTH, MATTERS
from rlhf_translate.options import Table
from rlhf_translate.shared import LAUNCH

ALIASES = {
    "max_new_tokens": "rollout.max_new_tokens",
    "adam.weight_decay": "actor.adam.weight_decay",
    "adam.betas": "actor.adam.betas",
    "adam.eps": "actor.adam.eps",
    "learning_rate": "actor.adam.lr",
    "adam.lr": "actor.adam.lr",
    "lr_scheduler": "actor.lr_scheduler",
    "lr_warmup_ratio": "actor.lr_warmup_ratio",
    "min_lr_ratio": "actor.min_lr_ratio",
    "max_norm": "actor.max_norm",
    "train_split": "data.dataset_split",
    "best_metric_key": "ckpt.best_metric_key",
    "loss": "model.loss_type",
    "prompt_key": "data.prompt_key",
    "model_name_or_path": "model.model_name_or_path",
    "ckpt_save_path": "ckpt.output_dir",
}

_OF_FSDP = ("ds.param_dtype", "ds.attn_implementation", "ds.enable_sleep")
"""Options that versions beyond the published ones, which train with FSDP, give under its name."""


def matters(method: str) -> Sequence[str]:
    return [*MATTERS, *(ppo.MATTERS if method == "ppo_ray" else rows.MATTERS)]


def convert(method: str) -> Table:
    table = LAUNCH | BOTH | (ppo.TABLE if method == "ppo_ray" else rows.TABLE)
    fsdp = {name.replace("ds.", "fsdp.", 1): row for name, row in table.items() if name in _OF_FSDP}
    return table | fsdp
