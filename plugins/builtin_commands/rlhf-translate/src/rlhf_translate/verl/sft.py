"""verl's supervised fine-tuning: ``fsdp_sft_trainer``, ``sft_trainer``."""

from __future__ import annotations

from rlhf_translate.options import (
    PROCESSES,
    PROGRAM,
    Convert,
    Given,
    Option,
    Outcome,
    Table,
    ask,
    key,
    lost,
    same,
    switch,
    to,
)
from rlhf_translate.shared import FSDP, picture_column, placed, rows_of, sequence_parallel, sources, warmup
from rlhf_translate.verl import schedules, sharding
from rlhf_translate.verl.models import betas, optimizer, overriding, project, resume, trackers

MATTERS = (
    "data.train_batch_size",
    "data.max_length",
    "data.truncation",
    "optim.lr",
    "optim.betas",
    "optim.weight_decay",
    "optim.warmup_steps_ratio",
    "optim.lr_warmup_steps_ratio",
    "optim.clip_grad",
    *(f"optim.{name}" for name in ("lr_scheduler", "init_lr_ratio", *schedules.MATTER)),
    "model.enable_gradient_checkpointing",
    "trainer.total_epochs",
    "trainer.save_freq",
    "trainer.test_freq",
    "trainer.logger",
    "trainer.project_name",
    "trainer.seed",
    "trainer.max_ckpt_to_keep",
)


def _prompt(option: Option, given: Given) -> Outcome:
    """Handles a prompt column, or a key of the mapping in it."""
    if "data.prompt_key" not in given:
        return same("no column is named")
    keys = given["data.prompt_dict_keys"].items if "data.prompt_dict_keys" in given else []
    if len(keys) > 1:
        return lost("one key of a mapping at a time here")
    return to({"data.prompt_key": ".".join([given["data.prompt_key"].written, *keys])})


def _answer(option: Option, given: Given) -> Outcome:
    if option.is_off or option.value == "completion":
        return same("the column is recognised")
    return lost("the column of answers is called completion here: rename it, or choose data.format")


def _messages(option: Option, given: Given) -> Outcome:
    return same("the column is recognised") if option.value == "messages" else to({"data.prompt_key": option.written})


def _truncation(option: Option, given: Given) -> Outcome:
    known = {"right": "truncate", "error": "filter"}
    if option.value not in known:
        return lost("longer rows are left out here, or lose their end")
    return to({"data.long_rows": known[option.value]}, "longer rows are left out" if option.value == "error" else "")


def _warmup(option: Option, given: Given) -> Outcome:
    if option.name.endswith("ratio"):
        if given.number("optim.lr_warmup_steps", -1) > 0:
            return same("lr_warmup_steps overrides it")
        return warmup("actor", option.number or 0.0, _updates(given))
    return to({"actor.warmup_steps": int(option.number or 0)}) if (option.number or -1) > 0 else same("no warm-up in steps")


def _updates(given: Given) -> int | None:
    if (steps := given.number("trainer.total_training_steps")) > 0:
        return int(steps)
    rows = rows_of(given["data.train_files"].texts) if "data.train_files" in given else None
    return rows and int(rows // given.number("data.train_batch_size", 1) * given.number("trainer.total_epochs", 1))


def _steps(option: Option, given: Given) -> Outcome:
    return same("passes count") if option.is_off else to({"train.steps": option.written})


def _passes(option: Option, given: Given) -> Outcome:
    if "trainer.total_training_steps" in given:
        return same("trainer.total_training_steps overrides it")
    return to({"data.epochs": option.written})


def _every(name: str) -> Convert:
    def convert(option: Option, given: Given) -> Outcome:
        if name == "eval.every" and "data.val_files" not in given:
            return same("nothing is evaluated")
        if not (option.number if option.value not in ("after_each_epoch",) else None):
            return ask("once per pass over the data, in steps", name)
        return to({name: max(0, int(option.number or 0))})

    return convert


def _lora(name: str) -> Convert:
    def convert(option: Option, given: Given) -> Outcome:
        if not given.number("model.lora_rank"):
            return same("no adapter is trained")
        return to({f"actor.lora.{name}": option.texts if name == "targets" else option.written})

    return convert


def _data(place: str) -> Convert:
    return lambda option, given: same("no data") if option.is_off else to({f"{place}.sources": sources(option.texts)})


_IN_PARTS = ("ulysses_sequence_parallel_size", "engine.ulysses_sequence_parallel_size", "engine.ulysses_parallel_size")
"""Names of the number of devices that compute one row."""


def _ranks(given: Given) -> float:
    return given.many(PROCESSES)


def _in_cpu_memory(option: Option, given: Given) -> Outcome:
    place = option.name.rpartition(".")[0]
    if not all(given.is_on(f"{place}.{name}") for name in ("cpu_offload", "offload_params")):
        return same("off, as it is here" if option.is_off else "cpu_offload and offload_params count together")
    return to({**FSDP, "backend.offload": "cpu"})


TABLE: Table = {
    **sharding.options("model.fsdp_config.", "model.strategy", _ranks, samples=False),
    **sharding.options("engine.", "engine.strategy", _ranks, samples=False),
    **{f"model.fsdp_config.{name}": _in_cpu_memory for name in ("cpu_offload", "offload_params")},
    PROGRAM: lambda option, given: to({"algo.name": "sft"}),
    PROCESSES: placed(),
    **{name: placed() for name in ("nproc_per_node", "nnodes", "num_gpus", "num_nodes", "num_processes")},
    "trainer.nnodes": lambda option, given: same("what starts the program says it"),
    "trainer.n_gpus_per_node": lambda option, given: same("what starts the program says it"),
    "data.train_files": _data("data"),
    "data.val_files": _data("eval.data"),
    "data.train_batch_size": key("train.batch_size", "rows per optimizer update, all processes together"),
    "data.max_length": key("data.max_tokens"),
    "data.truncation": _truncation,
    "data.image_key": picture_column,
    "data.prompt_key": _prompt,
    "data.prompt_dict_keys": _prompt,
    "data.response_dict_keys": _answer,
    "data.response_key": _answer,
    "data.messages_key": _messages,
    "data.multiturn.messages_key": _messages,
    "data.multiturn.enable": lambda option, given: same("rows with messages are recognised"),
    "model.partial_pretrain": key("actor.model"),
    "model.path": key("actor.model"),
    "model.enable_gradient_checkpointing": lambda option, given: to({"actor.gradient_checkpointing": not option.is_off}),
    "model.tokenizer_path": lambda option, given: (
        same("the model's") if option.is_off else to({"actor.tokenizer": option.written})
    ),
    "model.trust_remote_code": switch({"actor.trust_remote_code": True}),
    "model.use_liger": switch({"kernels.name": "liger"}),
    "model.lora_rank": _lora("rank"),
    "model.lora_alpha": _lora("alpha"),
    "model.target_modules": _lora("targets"),
    "optim.lr": key("actor.lr"),
    "optim.betas": betas("actor", "optim."),
    **overriding("actor", "optim."),
    **{f"optim.{name}": optimizer("optim.") for name in ("optimizer", "optimizer_impl")},
    "optim.weight_decay": key("actor.weight_decay"),
    "optim.clip_grad": key("actor.max_grad_norm"),
    **schedules.rows("actor", "optim"),
    **{name: sequence_parallel("actor") for name in _IN_PARTS},
    "optim.warmup_steps_ratio": _warmup,
    "optim.lr_warmup_steps_ratio": _warmup,
    "optim.lr_warmup_steps": _warmup,
    "trainer.total_training_steps": _steps,
    "trainer.total_epochs": _passes,
    "trainer.save_freq": _every("checkpoint.every"),
    "trainer.test_freq": _every("eval.every"),
    "trainer.max_ckpt_to_keep": lambda option, given: to({"checkpoint.keep": int(option.number or 0)}),
    "data.train_max_samples": lambda option, given: (
        to({"data.max_samples": option.value}) if (option.number or -1) > 0 else same("all rows")
    ),
    "trainer.seed": key("seed"),
    "trainer.logger": trackers,
    "trainer.project_name": project,
    "trainer.resume_mode": resume,
}
