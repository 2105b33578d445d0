"""verl's options whose value or meaning differs from ours."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rlhf_translate.options import NONE, Given, Option, Outcome, Table, ask, same
from rlhf_translate.shared import LAUNCH, UNREAD
from rlhf_translate.verl import algorithm, asynchronous, batch, correction, distillation, groups, losses, models, schedules, sft

ALIASES = {
    "custom_reward_function.path": "reward.custom_reward_function.path",
    "custom_reward_function.name": "reward.custom_reward_function.name",
    "reward_model.enable": "reward.reward_model.enable",
    "reward_model.model.path": "reward.reward_model.model_path",
    "reward_model.model_path": "reward.reward_model.model_path",
    **distillation.ALIASES,
    "actor_rollout_ref.actor.optim.warmup_style": "actor_rollout_ref.actor.optim.lr_scheduler_type",
    "critic.optim.warmup_style": "critic.optim.lr_scheduler_type",
    "optim.warmup_style": "optim.lr_scheduler_type",
}

ASKED = "???, which verl wants to be given"

_ACTOR, _ROLLOUT, _MODEL = (f"actor_rollout_ref.{name}." for name in ("actor", "rollout", "model"))

_MATTERS = (
    *(f"algorithm.{name}" for name in ("adv_estimator", "gamma", "lam", "kl_ctrl.kl_coef", "use_kl_in_reward")),
    *(f"algorithm.rollout_correction.rollout_is{name}" for name in ("", "_threshold")),
    *(f"data.{name}" for name in ("prompt_key", "max_prompt_length", "max_response_length", "train_batch_size", "truncation")),
    "reward.custom_reward_function.name",
    *(f"{_ROLLOUT}{name}" for name in ("name", "n", "temperature", "tensor_model_parallel_size", "gpu_memory_utilization")),
    *(f"{_ROLLOUT}{name}" for name in ("free_cache_engine", "max_num_seqs")),
    *(f"{_ROLLOUT}val_kwargs.{name}" for name in ("temperature", "n", "do_sample")),
    *(f"{_ACTOR}{name}" for name in ("strategy", "ppo_mini_batch_size", "ppo_epochs", "clip_ratio", "clip_ratio_low")),
    *(f"{_ACTOR}{name}" for name in ("clip_ratio_high", "clip_ratio_c", "loss_agg_mode", "entropy_coeff", "use_kl_loss")),
    *(f"{_ACTOR}{name}" for name in ("kl_loss_coef", "kl_loss_type", "grad_clip", "policy_loss.loss_mode")),
    *(f"{_ACTOR}optim.{name}" for name in ("lr", "weight_decay", "betas", "lr_warmup_steps_ratio", *schedules.MATTER)),
    *(f"{_MODEL}{name}" for name in ("enable_gradient_checkpointing", "lora_alpha")),
    *(f"critic.optim.{name}" for name in ("lr", "weight_decay", "betas", "lr_warmup_steps_ratio", *schedules.MATTER)),
    *distillation.MATTER,
    *losses.MATTER,
    *(f"critic.{name}" for name in ("cliprange_value", "model.path", "grad_clip", "model.enable_gradient_checkpointing")),
    *(
        f"trainer.{name}"
        for name in ("n_gpus_per_node", "nnodes", "total_epochs", "save_freq", "test_freq", "val_before_train")
    ),
    *(f"trainer.{name}" for name in ("logger", "project_name", "max_actor_ckpt_to_keep")),
)
"""Options whose defaults matter here."""


def matters(method: str) -> Sequence[str]:
    return sft.MATTERS if method == "sft" else _MATTERS


def convert(method: str) -> Table:
    own = sft.TABLE if method == "sft" else algorithm.TABLE | batch.TABLE | correction.TABLE | models.TABLE | asynchronous.TABLE
    return LAUNCH | _HYDRA | groups.table(method) | own


def _own_file(option: Option, given: Given) -> Outcome:
    """Handles ``--config-name``: one that verl has, one that is here, or another."""
    name = option.value.removesuffix(".yaml")
    if name in groups.USUAL:
        return same("it is the usual one")
    if name in groups.ON_IT:
        return same("verl's own, which is the usual one with what the program needs")
    if any(file.endswith(f"{name}.yaml") for file in given.files):
        return same("its options are translated")
    if name in groups.OF_MEGATRON:
        return groups.in_place_of("megatron")
    return ask(f"hydra's own file is not here, so {UNREAD}")


_HYDRA: Table = {
    "__config_name": _own_file,
    "config_name": _own_file,
    "config_path": lambda option, given: same("the folder of --config-name"),
    "defaults": lambda option, given: same("verl's own parts, whose defaults are taken"),
}

_REFERENCE = re.compile(r"\$\{(?:oc\.select:|oc\.env:)?([\w.]+)(?:,\s*([^}]*))?\}")


def resolved(options: Sequence[Option], defaults: Mapping[str, tuple[str, ...]]) -> list[Option]:
    """Returns options with references to others, such as ``${oc.select:a.b,1}``, replaced by their values.

    Args:
        defaults: defaults of verl.
    """
    options = distillation.renamed(options)
    known: dict[str, Option] = {name: Option(name, values) for name, values in defaults.items()}
    known |= {option.name: option for option in options}
    return [_look_up(option, option, known, 0) for option in options]


def _look_up(option: Option, place: Option, known: Mapping[str, Option], depth: int) -> Option:
    """Returns the option with its references replaced.

    Args:
        place: the option whose value it is in the end: references may be relative to it.
    """
    if option.values == ("???",):
        return replace(option, missing=(ASKED,))
    if option.missing or len(option.values) != 1 or not _REFERENCE.search(option.values[0]):
        return option
    missing: list[str] = []

    def put_in(match: re.Match[str]) -> str:
        name = f"{place.name.rpartition('.')[0]}{match[1]}" if match[1].startswith(".") else match[1]
        found = known.get(name) if depth < 8 else None
        if found is not None:
            inner = _look_up(found, found, known, depth + 1)
            missing.extend(inner.missing)
            return f"[{','.join(inner.values)}]" if len(inner.values) > 1 else " ".join(inner.values)
        if match[2] is None:
            missing.append(match[0])
            return match[0]
        return "null" if match[2].lower() in NONE else match[2]

    text = _REFERENCE.sub(put_in, option.values[0])
    return replace(option, values=(text,), missing=tuple(dict.fromkeys(missing)))
