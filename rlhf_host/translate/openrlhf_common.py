"""OpenRLHF's options that all of its programs have."""

from __future__ import annotations

from rlhf_host.translate.options import Convert, Defaults, Given, Option, Outcome, Table, same, to
from rlhf_host.translate.shared import attention, schedule, sources

COMMON: Defaults = {
    "train.seed": ("42",),
    "ckpt.save_steps": ("-1",),
    "ckpt.max_num": ("3",),
    "eval.steps": ("-1",),
    "data.apply_chat_template": ("False",),
    "ds.param_dtype": ("bf16",),
    "ds.zero_stage": ("2",),
    "actor.adam.betas": ("0.9", "0.95"),
    "actor.adam.eps": ("1e-08",),
    "actor.adam.weight_decay": ("0.0",),
    "actor.lr_scheduler": ("cosine_with_min_lr",),
    "actor.lr_warmup_ratio": ("0.03",),
    "actor.min_lr_ratio": ("0.1",),
    "actor.max_norm": ("1.0",),
    "ds.lora.alpha": ("16",),
    "train.batch_size": ("128",),
}


def _of_lora(name: str) -> Convert:
    def convert(option: Option, given: Given) -> Outcome:
        if not given.number("ds.lora.rank"):
            return same("no adapter is trained")
        return to({f"actor.lora.{name}": option.items if name == "targets" else option.value})

    return convert


def _steps(name: str) -> Convert:
    """There -1 is never; here 0."""
    return lambda option, given: to({name: max(0, int(option.number or 0))})


def betas(role: str) -> Convert:
    return lambda option, given: to({f"{role}.betas": [float(item) for item in option.items]})


def _dtype(option: Option, given: Given) -> Outcome:
    return to({"backend.name": "deepspeed", "backend.precision": option.value})


def _zero(option: Option, given: Given) -> Outcome:
    return to({"backend.name": "deepspeed", "backend.zero_stage": option.value})


def _deepspeed(name: str, value: str | None = None) -> Convert:
    def convert(option: Option, given: Given) -> Outcome:
        if option.is_off or option.number == 1:
            return same("off, as it is here")
        return to({"backend.name": "deepspeed", name: value or option.value})

    return convert


def _template(option: Option, given: Given) -> Outcome:
    """The chat template is the default here."""
    if option.name.endswith("input_template"):
        if given.is_on("data.apply_chat_template"):
            return same("the chat template counts")
        return to({"data.template": option.value.replace("{}", "{prompt}")})
    if not option.is_off:
        return same("the chat template of the tokenizer is the default")
    if "data.input_template" in given:
        return same("data.template is set")
    settings = {"data.template": "none"} | ({"eval.data.template": "none"} if "eval.dataset" in given else {})
    return to(settings, "there no chat template by default")


def data(name: str, shares: str, split: str) -> Convert:
    def convert(option: Option, given: Given) -> Outcome:
        paths, weights = given[name].items, given[shares].items if shares in given else []
        known = given[split].value if split in given and (given.wrote(split) or split == "eval.split") else None
        return to({("eval.data" if name == "eval.dataset" else "data") + ".sources": sources(paths, weights, split=known)})

    return convert


def only_written(convert: Convert, remark: str) -> Convert:
    return lambda option, given: convert(option, given) if option.line else same(remark)


def _wandb(option: Option, given: Given) -> Outcome:
    return to({"tracker.wandb.name": "wandb"}, "the key is that of wandb login, or WANDB_API_KEY")


BOTH: Table = {
    "ds.param_dtype": _dtype,
    "ds.zero_stage": _zero,
    "ds.zpg": _deepspeed("backend.zero_hpz_partition_size"),
    "ds.adam_offload": _deepspeed("backend.offload_optimizer", "cpu"),
    "ds.tensor_parallel_size": _deepspeed("backend.autotp_size"),
    "ds.overlap_comm": _deepspeed("backend.extra", '{"zero_optimization": {"overlap_comm": true}}'),
    "ds.deepcompile": _deepspeed("backend.extra", '{"compile": {"deepcompile": true}}'),
    "ds.grad_accum_dtype": lambda option, given: to(
        {"backend.name": "deepspeed", "backend.extra": f'{{"data_types": {{"grad_accum_dtype": "{option.value}"}}}}'}
    ),
    "ds.attn_implementation": attention,
    "ds.lora.alpha": _of_lora("alpha"),
    "ds.lora.target_modules": _of_lora("targets"),
    "actor.adam.betas": betas("actor"),
    "actor.lr_scheduler": schedule("actor"),
    "ckpt.save_steps": _steps("checkpoint.every"),
    "eval.steps": _steps("eval.every"),
    "eval.dataset": data("eval.dataset", "eval.probs", "eval.split"),
    "eval.split": only_written(data("eval.dataset", "eval.probs", "eval.split"), "nothing is evaluated"),
    "data.apply_chat_template": _template,
    "data.input_template": _template,
    "logger.wandb.key": _wandb,
    "logger.tensorboard_dir": lambda option, given: to({"tracker.tensorboard.name": "tensorboard"}, "in the run directory"),
}
