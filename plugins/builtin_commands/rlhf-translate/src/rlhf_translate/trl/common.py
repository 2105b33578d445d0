"""TRL's options that all of its trainers have: models, machines, data, logging."""

from __future__ import annotations

import ast
import json
import re

from rlhf_translate.options import PROCESSES, Convert, Given, Option, Outcome, Table, always, ask, key, lost, same, to
from rlhf_translate.shared import UNREAD, attention, placed, schedule, sources, trackers
from rlhf_translate.trl import sharding
from rlhf_translate.trl.batch import batch, every, max_steps, moving_reference, passes, warmup

MATTERS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "num_train_epochs",
    "max_steps",
    "lr_scheduler_type",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "max_grad_norm",
    "gradient_checkpointing",
    "bf16",
    "dtype",
    "seed",
    "save_steps",
    "save_total_limit",
    "eval_strategy",
    "eval_on_start",
    "lora_r",
    "lora_alpha",
    "lora_dropout",
    "disable_dropout",
    "ref_model_mixup_alpha",
    "ref_model_sync_steps",
    "lora_target_modules",
)
"""Options whose defaults matter here."""

LAUNCHED = ("num_processes", "nproc_per_node", "num_gpus", "nnodes", "num_nodes", "num_machines", "include", "multi_gpu")
"""Options of launchers that tell the number of processes."""


def _lora(name: str) -> Convert:
    def convert(option: Option, given: Given) -> Outcome:
        if not given.is_on("use_peft"):
            return same("no adapter is trained")
        if name == "targets" and option.is_off:
            return lost("the modules that PEFT trains of this architecture; here all linear maps")
        if name == "dropout" and not option.number:
            return same("0, as it is here")
        if name == "dropout" and given.is_on("disable_dropout"):
            return same("disable_dropout sets it to 0 there too")
        return to({f"actor.lora.{name}": option.texts if name == "targets" else option.written})

    return convert


def _disable_dropout(option: Option, given: Given) -> Outcome:
    if option.is_on or not option.line:
        return same("on, as it is here, but for adapters" if option.is_on else "most models have none of their own")
    return lost("the model's own dropout is off in training")


def _use_peft(option: Option, given: Given) -> Outcome:
    return to({"actor.lora.rank": given["lora_r"].written}) if not option.is_off else same("off, as it is here")


_OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf"), "AdamW"),
    "sgd": "SGD",
    "adagrad": "Adagrad",
    "rmsprop": "RMSprop",
    "adamw_bnb_8bit": "AdamW8bit",
    "adamw_8bit": "AdamW8bit",
    "lion_8bit": "Lion8bit",
    "lion_32bit": "Lion",
    "paged_adamw_8bit": "PagedAdamW8bit",
    "paged_adamw_32bit": "PagedAdamW32bit",
    "paged_lion_8bit": "PagedLion8bit",
    "paged_lion_32bit": "PagedLion32bit",
    "rmsprop_bnb": "RMSprop32bit",
    "rmsprop_bnb_32bit": "RMSprop32bit",
    "rmsprop_bnb_8bit": "RMSprop8bit",
}
"""Optimizer of transformers' Trainer → class of torch or bitsandbytes that it is (``trainer_optimizer.py``)."""
_ARGUMENTS = {
    "sgd": ("momentum", "dampening", "nesterov"),
    "adagrad": ("lr_decay", "eps"),
    "rmsprop": ("momentum", "alpha", "eps", "centered"),
}
"""Optimizer → arguments that it takes from ``optim_args``; ``weight_decay`` is that of all options there too."""


def _chosen(given: Given) -> str:
    return given["optim"].value if "optim" in given else "adamw_torch"


def _optim(option: Option, given: Given) -> Outcome:
    if option.value not in _OPTIMIZERS:
        return lost(f"optimizers that are known here: {', '.join(_OPTIMIZERS)}")
    name = _OPTIMIZERS[option.value]
    return same("AdamW") if name == "AdamW" else to({"backend.optimizer": name})


def _optim_args(option: Option, given: Given) -> Outcome:
    chosen = _chosen(given)
    if option.is_off or _OPTIMIZERS.get(chosen) == "AdamW":
        return same("none" if option.is_off else f"{chosen} takes none")
    pairs = [item.partition("=") for item in option.items]
    if unknown := [key for key, _, _ in pairs if key not in _ARGUMENTS.get(chosen, ())]:
        return lost(f"{unknown[0]} is no argument of {chosen}")
    truth = {"true": "true", "false": "false", "yes": "true", "no": "false"}
    return to({"backend.optimizer_args": [f"{key}={truth.get(value.lower(), value)}" for key, _, value in pairs]})


def _of_adam(convert: Convert, *others: str) -> Convert:
    """Handles an option that only Adam has there, and optimizers whose names have one of ``others``."""

    def convert_(option: Option, given: Given) -> Outcome:
        chosen = _chosen(given)
        return convert(option, given) if any(name in chosen for name in ("adam", *others)) else same(f"{chosen} has none")

    return convert_


def _betas(option: Option, given: Given) -> Outcome:
    return to({"actor.betas": [given.number("adam_beta1"), given.number("adam_beta2")]})


def _of_schedule(option: Option, given: Given) -> Outcome:
    try:
        ratio = json.loads(option.value).get("min_lr_rate")
    except (ValueError, AttributeError):
        ratio = None
    return to({"actor.min_lr_ratio": ratio}) if ratio is not None else lost("only min_lr_rate is known here")


def _at_start(option: Option, given: Given) -> Outcome:
    if given["eval_strategy"].value in ("no", "none"):
        return same("nothing is evaluated")
    return to({"eval.at_start": not option.is_off})


def _dtype(option: Option, given: Given) -> Outcome:
    """Handles the type of weights. Versions before 0.27 leave it to the checkpoint, or to float32 of transformers before 5."""
    if option.value.lower() in ("none", "null"):
        return lost("the type that transformers chooses; here float32 for what is trained") if option.line else same("float32")
    return to({"actor.dtype": option.value})


_OF_CLASS = {
    "dtype": "actor.dtype",
    "torch_dtype": "actor.dtype",
    "attn_implementation": "actor.attn_implementation",
    "revision": "actor.revision",
    "trust_remote_code": "actor.trust_remote_code",
}
"""Keyword arguments of a model's class that are settings here."""


def _of_class(option: Option, given: Given) -> Outcome:
    """Handles keyword arguments of the model's class, as JSON or as they are in Python."""
    if option.is_off or option.value == "{}":
        return same("none are given")
    text = re.sub(r"\btorch\.(\w+)", r"'\1'", option.value)
    try:
        values = ast.literal_eval(re.sub(r"\b(true|false|null)\b", lambda word: _PYTHONS[word[0]], text))
        known = {_OF_CLASS[name]: value for name, value in values.items() if name in _OF_CLASS and value is not None}
    except (ValueError, SyntaxError, AttributeError, TypeError):
        return lost("keyword arguments of the model's class")
    others = [name for name in values if name not in _OF_CLASS and name not in _NEEDLESS]
    if not known:
        return lost("keyword arguments of the model's class") if others else same("it changes the speed, not the result")
    return to(known, f"without {', '.join(others)}" if others else "")


_PYTHONS = {"true": "True", "false": "False", "null": "None"}
_NEEDLESS = ("use_cache", "device_map", "low_cpu_mem_usage")


def _bf16(option: Option, given: Given) -> Outcome:
    """Handles bf16, which is on in TRL unless fp16 is."""
    if not option.line and given.is_on("fp16"):
        return same("fp16 is on instead")
    unset = option.value.lower() in ("none", "null")  # from 0.19 on, which means on
    return to({"train.autocast": "off" if option.is_off and not unset else "bfloat16"})


def _trackers(option: Option, given: Given) -> Outcome:
    return trackers(option, "none", "none, as it is here")


def _of_trackio(name: str) -> Convert:
    def convert(option: Option, given: Given) -> Outcome:
        chosen = "report_to" in given and "trackio" in given["report_to"].items
        if not chosen or option.value.lower() in ("none", "null"):
            return same("nothing is sent to Trackio" if not chosen else "this machine, as it is here")
        return to({f"tracker.trackio.{name}": option.written})

    return convert


def _mixture(option: Option, given: Given) -> Outcome:
    """Handles ``datasets`` of a file: mappings."""
    names = {"path": "path", "name": "subset", "split": "split", "fraction": "weight"}
    try:
        entries = [json.loads(value) for value in option.values]
        return to({"data.sources": [{names[key]: value for key, value in entry.items()} for entry in entries]})
    except (ValueError, KeyError, AttributeError):
        return lost(f"keys of a data set that are known here: {', '.join(names)}")


def _data(option: Option, given: Given) -> Outcome:
    if "dataset_name" not in given:
        return lost("there is no data set that it is of")
    paths = given["dataset_name"].texts
    subset = given["dataset_config"].written if "dataset_config" in given else None
    train = given["dataset_train_split"].written if "dataset_train_split" in given else None
    settings = {"data.sources": sources(paths, split=train, subset=subset)}
    if given["eval_strategy"].value not in ("no", "none") and "eval_dataset_name" not in given:
        test = given["dataset_test_split"].written if "dataset_test_split" in given else "test"
        settings["eval.data.sources"] = sources(paths, split=test, subset=subset)
    return to(settings)


def _of_wandb(name: str) -> Convert:
    """Handles options of open-r1."""
    return lambda option, given: (
        to({f"tracker.wandb.{name}": option.written})
        if "report_to" in given and "wandb" in given["report_to"].items
        else same("nothing is sent to wandb")
    )


def _own_evaluation(option: Option, given: Given) -> Outcome:
    """Handles another data set for evaluation, which a Python script loads."""
    if given["eval_strategy"].value in ("no", "none"):
        return same("nothing is evaluated")
    split = given["dataset_test_split"].written if given.wrote("dataset_test_split") else None
    return to({"eval.data.sources": sources(option.texts, split=split)})


TABLE: Table = {
    **sharding.TABLE,
    "eval_dataset_name": _own_evaluation,
    "system_prompt": key("data.system_prompt", "an option of open-r1"),
    "dataset_prompt_column": key("data.prompt_key", "an option of open-r1"),
    "project": _of_trackio("project"),
    "trackio_space_id": _of_trackio("space_id"),
    "wandb_project": _of_wandb("project"),
    "wandb_entity": _of_wandb("entity"),
    "wandb_run_group": _of_wandb("group"),
    **{name: batch for name in ("per_device_train_batch_size", "gradient_accumulation_steps")},
    **{name: placed() for name in LAUNCHED},
    PROCESSES: placed(),
    "max_steps": max_steps,
    **dict.fromkeys(("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"), moving_reference),
    "num_train_epochs": passes,
    "save_steps": every("checkpoint.every", "save_strategy", "steps"),
    "save_strategy": every("checkpoint.every", "save_strategy", "steps"),
    "eval_steps": every("eval.every", "eval_strategy", "no"),
    "eval_strategy": every("eval.every", "eval_strategy", "no"),
    "save_total_limit": lambda option, given: to({"checkpoint.keep": int(option.number or 0)}),
    "lr_scheduler_type": schedule("actor"),
    "lr_scheduler_kwargs": _of_schedule,
    "warmup_steps": warmup,
    "warmup_ratio": warmup,
    "adam_beta1": _of_adam(_betas, "lion"),
    "adam_beta2": _of_adam(_betas, "lion"),
    "adam_epsilon": _of_adam(key("actor.adam_eps")),
    "optim": _optim,
    "optim_args": _optim_args,
    "gradient_checkpointing": lambda option, given: to({"actor.gradient_checkpointing": not option.is_off}),
    "bf16": _bf16,
    "torch_dtype": _dtype,
    "disable_dropout": _disable_dropout,
    "eval_on_start": _at_start,
    "bnb_4bit_quant_type": lambda option, given: same("nf4") if option.value == "nf4" else lost("4 bits are NF4 here"),
    "dtype": _dtype,
    "model_init_kwargs": _of_class,
    "attn_implementation": attention,
    "use_peft": _use_peft,
    "lora_r": _lora("rank"),
    "lora_alpha": _lora("alpha"),
    "lora_target_modules": _lora("targets"),
    "lora_dropout": _lora("dropout"),
    "mixed_precision": always("bf16 and fp16 of the program count"),
    "packing": lambda option, given: (
        same("rows are packed by tokens; train.batch_size says how many there are per update")
        if not option.is_off
        else same("rows are packed by tokens")
    ),
    "config": lambda option, given: (
        same("its options are translated") if option.value in given.files else ask(f"the file is not here, so {UNREAD}")
    ),
    **{name: _data for name in ("dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split")},
    "datasets": _mixture,
    "report_to": _trackers,
    "log_completions": always("answers are shown, and kept in trajectories/"),
    "push_to_hub": lambda option, given: (
        same("off, as it is here") if option.is_off else lost("after the run: rlhf push RUN_DIR REPO_ID")
    ),
}
