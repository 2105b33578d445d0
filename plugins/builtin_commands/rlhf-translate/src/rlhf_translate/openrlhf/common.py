"""OpenRLHF's options that all of its programs have."""

from __future__ import annotations

import json
import re

from rlhf_translate.options import Convert, Given, Option, Outcome, Table, lost, same, to
from rlhf_translate.shared import attention, frozen_tower, picture_column, schedule, sequence_parallel, sources

MATTERS = (
    "train.seed",
    "ckpt.save_steps",
    "ckpt.max_num",
    "eval.steps",
    "data.apply_chat_template",
    "data.input_template",
    "ds.param_dtype",
    "bf16",
    "ds.zero_stage",
    "actor.adam.lr",
    "actor.adam.betas",
    "actor.adam.eps",
    "actor.adam.weight_decay",
    "actor.lr_scheduler",
    "actor.lr_warmup_ratio",
    "actor.min_lr_ratio",
    "actor.max_norm",
    "ds.lora.alpha",
    "train.batch_size",
    "train.max_epochs",
    "data.max_len",
    "eval.split",
)
"""Options whose defaults matter here."""

LATER = (0, 10, 2)
"""The first version whose options have dots, and whose critic has a schedule of its own."""


def _of_lora(name: str) -> Convert:
    def convert(option: Option, given: Given) -> Outcome:
        if not given.number("ds.lora.rank"):
            return same("no adapter is trained")
        return to({f"actor.lora.{name}": option.texts if name == "targets" else option.written})

    return convert


def _steps(name: str) -> Convert:
    """Converts a number of steps: never is -1 there, and 0 here."""
    return lambda option, given: to({name: max(0, int(option.number or 0))})


def betas(role: str) -> Convert:
    return lambda option, given: to({f"{role}.betas": option.numbers})


def _dtype(option: Option, given: Given) -> Outcome:
    return to({"backend.name": "deepspeed", "backend.precision": option.written})


def _bf16(option: Option, given: Given) -> Outcome:
    """Handles ``bf16`` of versions up to 0.9.1: without it, weights have the checkpoint's own type."""
    if option.is_off:
        return lost("weights of the checkpoint's own type: --actor.dtype") if not option.line else same("off, as it is here")
    return to({"backend.name": "deepspeed", "backend.precision": "bf16"})


def _zero(option: Option, given: Given) -> Outcome:
    return to({"backend.name": "deepspeed", "backend.zero_stage": option.written})


def _deepspeed(name: str, value: str | None = None) -> Convert:
    def convert(option: Option, given: Given) -> Outcome:
        if option.is_off or (option.values and option.number == 1):
            return same("off, as it is here")
        return to({"backend.name": "deepspeed", name: value or option.written})

    return convert


def _template(option: Option, given: Given) -> Outcome:
    """Handles the chat template, which is the default here."""
    if given.is_on("model.pretrain_mode_enable"):
        return same("texts train as they are")
    if option.name.endswith("input_template"):
        if given.is_on("data.apply_chat_template"):
            return same("the chat template counts")
        if option.value.lower() in ("none", ""):
            return same("none")
        text = option.value
        if quoted := re.fullmatch(r"\$'(.*)'", text, re.S):  # as a here-document leaves it
            text = quoted[1].encode("raw_unicode_escape").decode("unicode_escape")
        return to({"data.template": text.replace("{}", "{prompt}")})
    if not option.is_off:
        return same("the chat template of the tokenizer is the default")
    if "data.input_template" in given:
        return same("data.template is set")
    settings = {"data.template": "none"} | ({"eval.data.template": "none"} if "eval.dataset" in given else {})
    return to(settings, "there no chat template by default")


def data(name: str, shares: str, split: str) -> Convert:
    def convert(option: Option, given: Given) -> Outcome:
        if name not in given:
            return lost("there is no data set that it is of")
        paths, weights = given[name].texts, given[shares].items if shares in given else []
        known = given[split].written if split in given and (given.wrote(split) or split == "eval.split") else None
        return to({("eval.data" if name == "eval.dataset" else "data") + ".sources": sources(paths, weights, split=known)})

    return convert


def only_written(convert: Convert, remark: str) -> Convert:
    return lambda option, given: convert(option, given) if option.line else same(remark)


def _wandb(option: Option, given: Given) -> Outcome:
    return to({"tracker.wandb.name": "wandb"}, "the key is that of wandb login, or WANDB_API_KEY")


def _extra(option: Option, given: Given) -> Outcome:
    """Returns keys of DeepSpeed's own configuration, from all options that set one together."""
    if option.is_off:
        return same("off, as it is here")
    keys: dict[str, object] = {}
    for name, extra in _EXTRA.items():
        keys |= extra if given.wrote(name) and given.is_on(name) else {}
    if given.wrote(_GRADIENTS):
        keys |= {"data_types": {"grad_accum_dtype": given[_GRADIENTS].value}}
    return to({"backend.name": "deepspeed", "backend.extra": json.dumps(keys)})


_MUON = (
    "Muon there is DeepSpeed's, whose matrices have a learning rate of their own; here it is --backend torch --backend.optimizer"
    " Muon, whose step has the size of AdamW's, so that one rate serves all"
)


def _optimizer(option: Option, given: Given) -> Outcome:
    return same("AdamW") if option.value == "adam" else lost(_MUON)


def _of_muon(option: Option, given: Given) -> Outcome:
    role = option.name.removeprefix("--").rpartition("muon.")[0]
    chosen = given[f"{role}optim"].value if f"{role}optim" in given else "adam"
    return lost(_MUON) if chosen == "muon" else same("AdamW is chosen")


_EXTRA: dict[str, dict[str, object]] = {
    "ds.overlap_comm": {"zero_optimization": {"overlap_comm": True}},
    "ds.deepcompile": {"compile": {"deepcompile": True}},
}
_GRADIENTS = "ds.grad_accum_dtype"

BOTH: Table = {
    "ds.param_dtype": _dtype,
    "bf16": _bf16,
    "ds.zero_stage": _zero,
    "ds.zpg": _deepspeed("backend.zero_hpz_partition_size"),
    "ds.adam_offload": _deepspeed("backend.offload_optimizer", "cpu"),
    "ds.tensor_parallel_size": _deepspeed("backend.autotp_size"),
    "ds.ring_attn_size": sequence_parallel("actor"),
    **{f"{role}optim": _optimizer for role in ("", "actor.", "critic.")},
    **{
        f"{role}muon.{name}": _of_muon
        for role in ("", "actor.", "critic.")
        for name in ("lr", "momentum", "ns_steps", "nesterov", "no_nesterov")
    },
    **{name: _extra for name in (*_EXTRA, _GRADIENTS)},
    "ds.attn_implementation": attention,
    "ds.lora.alpha": _of_lora("alpha"),
    "ds.lora.dropout": _of_lora("dropout"),
    "ds.lora.target_modules": _of_lora("targets"),
    "actor.adam.betas": betas("actor"),
    "actor.lr_scheduler": schedule("actor"),
    "ckpt.save_steps": _steps("checkpoint.every"),
    "eval.steps": _steps("eval.every"),
    "eval.dataset": data("eval.dataset", "eval.probs", "eval.split"),
    "eval.split": only_written(data("eval.dataset", "eval.probs", "eval.split"), "nothing is evaluated"),
    "data.apply_chat_template": _template,
    "data.input_template": _template,
    **dict.fromkeys(("data.image_key", "image_key"), picture_column),
    "actor.freeze_visual_encoder": frozen_tower,
    "logger.wandb.key": _wandb,
    "logger.tensorboard_dir": lambda option, given: to({"tracker.tensorboard.name": "tensorboard"}, "in the run directory"),
}
