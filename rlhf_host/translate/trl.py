"""TRL's options where value or meaning differ from ours, and its defaults."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace

from rlhf_host.translate.options import (
    PROGRAM,
    Convert,
    Defaults,
    Given,
    Option,
    Outcome,
    Table,
    always,
    count,
    key,
    lost,
    never,
    rounded,
    same,
    switch,
    to,
)
from rlhf_host.translate.shared import (
    LAUNCH,
    aggregation,
    attention,
    clip_limits,
    rewards,
    rows_of,
    run_steps,
    schedule,
    scheduled_warmup,
    sources,
)

SAMPLED = ("grpo", "rloo")

ALGORITHMS = {"dpo": "dpo", "sft": "sft", "kto": "kto", "reward": "rm", "rloo": "rloo"}

_COMMON: Defaults = {
    "per_device_train_batch_size": ("8",),
    "gradient_accumulation_steps": ("1",),
    "num_train_epochs": ("3.0",),
    "max_steps": ("-1",),
    "lr_scheduler_type": ("linear",),
    "weight_decay": ("0.0",),
    "adam_beta1": ("0.9",),
    "adam_beta2": ("0.999",),
    "adam_epsilon": ("1e-08",),
    "max_grad_norm": ("1.0",),
    "gradient_checkpointing": ("True",),
    "bf16": ("True",),
    "dtype": ("float32",),
    "seed": ("42",),
    "save_steps": ("500",),
    "save_total_limit": ("None",),
    "eval_strategy": ("no",),
    "lora_r": ("16",),
    "lora_alpha": ("32",),
    "lora_dropout": ("0.05",),
    "lora_target_modules": ("None",),
}

_ROLLOUTS: Defaults = {
    "learning_rate": ("1e-06",),
    "max_completion_length": ("512",),
    "epsilon": ("0.2",),
    "epsilon_high": ("None",),
    "num_iterations": ("1",),
    "vllm_gpu_memory_utilization": ("0.3",),
}

_OWN: dict[str, Defaults] = {
    "grpo": {
        **_ROLLOUTS,
        "num_generations": ("8",),
        "delta": ("None",),
        "beta": ("0.0",),
        "use_bias_correction_kl": ("True",),
        "loss_type": ("dapo",),
        "scale_rewards": ("group",),
        "vllm_importance_sampling_correction": ("True",),
        "vllm_importance_sampling_mode": ("sequence_mask",),
        "vllm_importance_sampling_clip_max": ("3.0",),
    },
    "rloo": {**_ROLLOUTS, "num_generations": ("2",), "beta": ("0.05",)},
    "dpo": {"learning_rate": ("1e-06",), "max_length": ("1024",), "beta": ("0.1",)},
    "sft": {
        "learning_rate": ("2e-05",),
        "max_length": ("1024",),
        "shuffle_dataset": ("False",),
        "assistant_only_loss": ("False",),
    },
    "kto": {"learning_rate": ("1e-06",), "max_length": ("1024",), "beta": ("0.1",)},
    "reward": {"learning_rate": ("0.0001",), "max_length": ("1024",)},
}


def defaults(method: str) -> Defaults:
    return _COMMON | _OWN[method]


def resolved(options: Sequence[Option]) -> list[Option]:
    """``--no_NAME`` as ``--NAME False``."""
    known = {f"--no_{name}": f"--{name}" for name in (*_COMMON, *_BOTH, *_OF_ROLLOUTS)}
    names = {option.name: known.get(option.name.replace("-", "_").replace("__", "--", 1)) for option in options}
    return [
        replace(option, name=name, values=("False",)) if (name := names[option.name]) and not option.values else option
        for option in options
    ]


def convert(method: str) -> Table:
    return LAUNCH | _BOTH | (_OF_ROLLOUTS if method in SAMPLED else _OF_ROWS)


# --- batches and steps --------------------------------------------------------------------------


_PROCESSES = ("num_processes", "nproc_per_node", "num_gpus")


def _processes(given: Given) -> int:
    return next((count(given.number(name)) for name in _PROCESSES if name in given), 1)


def _micro_batches(given: Given) -> float:
    """Per update."""
    return given.number("gradient_accumulation_steps", 1)


def _per_generation(given: Given) -> float:
    """Completions that are sampled at once."""
    if "generation_batch_size" in given:
        return given.number("generation_batch_size")
    steps = given.number("steps_per_generation", _micro_batches(given))
    return given.number("per_device_train_batch_size") * _processes(given) * steps


def _minibatches(given: Given) -> int:
    size = given.number("per_device_train_batch_size") * _processes(given) * _micro_batches(given)
    return count(_per_generation(given) / max(1.0, size))


def _updates(given: Given) -> int:
    """Optimizer updates in one of our steps."""
    return _minibatches(given) * count(given.number("num_iterations", 1)) if given.method in SAMPLED else 1


def _batch(option: Option, given: Given) -> Outcome:
    if given.method not in SAMPLED:
        rows = given.number("per_device_train_batch_size") * _processes(given) * _micro_batches(given)
        return to({"train.batch_size": count(rows)}, "rows or pairs per optimizer update, all processes together")
    prompts = _per_generation(given) / max(1.0, given.number("num_generations", 1))
    settings = {"train.batch_size": count(prompts), "train.minibatches": _minibatches(given)}
    return to(
        settings, f"{_per_generation(given):g} completions / {given['num_generations'].value} per prompt{rounded(prompts)}"
    )


def _generations(option: Option, given: Given) -> Outcome:
    return to({"rollout.n": option.value, **_batch(option, given).settings})


def _devices(option: Option, given: Given) -> Outcome:
    if _processes(given) == 1:
        return same("one process")
    return to({"runtime.name": "ray", "placement": [f"actor={_processes(given)}"], **_batch(option, given).settings})


def _max_steps(option: Option, given: Given) -> Outcome:
    if (option.number or 0) <= 0:
        return same("the number of passes counts")
    steps = (option.number or 0) / _updates(given)
    remark = f"{option.value} updates, {_updates(given)} per batch{rounded(steps)}" if _updates(given) > 1 else ""
    return to({"train.steps": count(steps)}, remark)


def _passes(option: Option, given: Given) -> Outcome:
    if given.number("max_steps") > 0:
        return same("max_steps overrides it")
    if given.method in SAMPLED:
        size = _batch(option, given).settings["train.batch_size"]
        return run_steps(option, size, rows_of(given["dataset_name"].items))
    return to({"data.epochs": option.value})


def _every(name: str, strategy: str, usual: str) -> Convert:
    def convert(option: Option, given: Given) -> Outcome:
        chosen = given[strategy].value if strategy in given else usual
        if chosen == "no":
            return same("never") if name == "eval.every" else to({name: 0}, "never")
        if chosen == "epoch":
            return lost(f"once per pass: set --{name} to its steps")
        steps = given["eval_steps" if name == "eval.every" else "save_steps"].number
        return to({name: count(steps / _updates(given))}) if steps else same("at the start and the end")

    return convert


def _warmup(option: Option, given: Given) -> Outcome:
    steps = option.number or 0.0
    if steps >= 1 and given["lr_scheduler_type"].value != "constant":
        return to({"actor.warmup_steps": int(steps)})
    updates = given.number("max_steps")
    return scheduled_warmup("actor", given["lr_scheduler_type"], steps, int(updates) if updates > 0 else None)


# --- models and machines ------------------------------------------------------------------------


def _lora(name: str) -> Convert:
    def convert(option: Option, given: Given) -> Outcome:
        if not given.is_on("use_peft"):
            return same("no adapter is trained")
        if name == "targets" and option.is_off:
            return lost("the modules that PEFT trains of this architecture; here all linear maps")
        if name == "dropout":
            return same("0, as it is here") if not option.number else lost("adapters have no dropout here")
        return to({f"actor.lora.{name}": option.items if name == "targets" else option.value})

    return convert


def _use_peft(option: Option, given: Given) -> Outcome:
    return to({"actor.lora.rank": given["lora_r"].value}) if not option.is_off else same("off, as it is here")


def _zero(option: Option, given: Given) -> Outcome:
    if match := re.search(r"zero_?([123])", option.value):
        return to({"runtime.name": "ray", "backend.name": "deepspeed", "backend.zero_stage": match[1]}, "by the file's name")
    return lost("the file is not read: its settings are --backend and --placement here")


def _betas(option: Option, given: Given) -> Outcome:
    return to({"actor.betas": [given.number("adam_beta1"), given.number("adam_beta2")]})


def _of_schedule(option: Option, given: Given) -> Outcome:
    try:
        ratio = json.loads(option.value).get("min_lr_rate")
    except (ValueError, AttributeError):
        ratio = None
    return to({"actor.min_lr_ratio": ratio}) if ratio is not None else lost("only min_lr_rate is known here")


def _bf16(option: Option, given: Given) -> Outcome:
    """There it is on unless fp16 is."""
    if not option.line and given.is_on("fp16"):
        return same("fp16 is on instead")
    return to({"train.autocast": "off" if option.is_off else "bfloat16"})


def _trackers(option: Option, given: Given) -> Outcome:
    known = {f"tracker.{name}.name": name for name in option.items if name in ("wandb", "tensorboard")}
    others = [name for name in option.items if name not in ("wandb", "tensorboard", "none")]
    if others and not known:
        return lost(f"no tracker here is called {', '.join(others)}")
    return to(known, f"without {', '.join(others)}" if others else "") if known else same("none, as it is here")


def _mixture(option: Option, given: Given) -> Outcome:
    """``datasets`` of a file: mappings."""
    names = {"path": "path", "name": "subset", "split": "split", "fraction": "weight"}
    try:
        entries = [json.loads(value) for value in option.values]
        return to({"data.sources": [{names[key]: value for key, value in entry.items()} for entry in entries]})
    except (ValueError, KeyError, AttributeError):
        return lost(f"keys of a data set that are known here: {', '.join(names)}")


def _data(option: Option, given: Given) -> Outcome:
    paths = given["dataset_name"].items
    subset = given["dataset_config"].value if "dataset_config" in given else None
    train = given["dataset_train_split"].value if "dataset_train_split" in given else None
    settings = {"data.sources": sources(paths, split=train, subset=subset)}
    if given["eval_strategy"].value not in ("no", "none"):
        test = given["dataset_test_split"].value if "dataset_test_split" in given else "test"
        settings["eval.data.sources"] = sources(paths, split=test, subset=subset)
    return to(settings)


_BOTH: Table = {
    PROGRAM: lambda option, given: to({"algo.name": ALGORITHMS[given.method]}),
    **{name: _batch for name in ("per_device_train_batch_size", "gradient_accumulation_steps")},
    **{name: _devices for name in _PROCESSES},
    "num_machines": never("the machines are those of --placement actor=NODESxDEVICES"),
    "max_steps": _max_steps,
    "num_train_epochs": _passes,
    "save_steps": _every("checkpoint.every", "save_strategy", "steps"),
    "save_strategy": _every("checkpoint.every", "save_strategy", "steps"),
    "eval_steps": _every("eval.every", "eval_strategy", "no"),
    "eval_strategy": _every("eval.every", "eval_strategy", "no"),
    "save_total_limit": lambda option, given: to({"checkpoint.keep": int(option.number or 0)}),
    "lr_scheduler_type": schedule("actor"),
    "lr_scheduler_kwargs": _of_schedule,
    "warmup_steps": _warmup,
    "warmup_ratio": _warmup,
    "adam_beta1": _betas,
    "adam_beta2": _betas,
    "optim": lambda option, given: (
        same("AdamW") if option.value.startswith("adamw_torch") else lost("the optimizer is AdamW here")
    ),
    "gradient_checkpointing": lambda option, given: to({"actor.gradient_checkpointing": not option.is_off}),
    "bf16": _bf16,
    "torch_dtype": key("actor.dtype"),
    "attn_implementation": attention,
    "use_peft": _use_peft,
    "lora_r": _lora("rank"),
    "lora_alpha": _lora("alpha"),
    "lora_target_modules": _lora("targets"),
    "lora_dropout": _lora("dropout"),
    "deepspeed": _zero,
    "accelerate_config": _zero,
    "config_file": _zero,
    "config": lambda option, given: (
        same("its options are translated") if option.value in given.files else lost("the file is not there, so it is not read")
    ),
    **{name: _data for name in ("dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split")},
    "datasets": _mixture,
    "report_to": _trackers,
    "log_completions": always("answers are shown, and kept in trajectories/"),
    "push_to_hub": lambda option, given: (
        same("off, as it is here") if option.is_off else lost("after the run: rlhf push RUN_DIR REPO_ID")
    ),
}

# --- grpo, rloo ---------------------------------------------------------------------------------


def _program(option: Option, given: Given) -> Outcome:
    if given.method == "rloo":
        settings = {"algo.name": "rloo", "algo.aggregation": "sequence-mean-token-sum", "algo.dual_clip": None}
        return to(settings, "ratio and clip per token here, of the whole sequence there; on policy the gradient is the same")
    if given["multi_objective_aggregation"].value == "normalize_then_sum":
        return to({"algo.name": "gdpo"})
    return to({"algo.name": "dr_grpo" if given["loss_type"].value == "dr_grpo" and not _is_gspo(given) else "grpo"})


_LOSSES = {
    "dapo": {"algo.aggregation": "token-mean"},
    "bnpo": {"algo.aggregation": "token-mean"},
    "grpo": {"algo.aggregation": "sequence-mean-token-mean"},
    "luspo": {"algo.aggregation": "sequence-mean-token-sum"},
    "cispo": {"algo.loss": "cispo", "algo.aggregation": "token-mean"},
    "sapo": {"algo.loss": "sapo", "algo.aggregation": "sequence-mean-token-mean"},
    "dr_grpo": {"algo.name": "dr_grpo"},
}


def _is_gspo(given: Given) -> bool:
    return given["importance_sampling_level"].value == "sequence" and given["loss_type"].value not in ("cispo", "sapo")


def _loss(option: Option, given: Given) -> Outcome:
    if option.value not in _LOSSES:
        return lost(f"losses that are known here: {', '.join(_LOSSES)}")
    if _is_gspo(given) and option.value == "dr_grpo":
        return to({"algo.std": "none"}, "gspo is a mean over sequences here, not a sum")
    settings: dict[str, object] = dict(_LOSSES[option.value])
    if option.value == "cispo" and "epsilon_high" in given:
        settings["algo.cispo_max"] = given["epsilon_high"].value
    if _is_gspo(given) and "algo.aggregation" in settings:
        return aggregation("gspo", _LOSSES[option.value]["algo.aggregation"])
    return to(settings)


def _level(option: Option, given: Given) -> Outcome:
    if option.value != "sequence":
        return same("token, as it is here")
    if not _is_gspo(given):
        return lost(f"the ratio of {given['loss_type'].value} is that of a token here")
    return to({"algo.loss": "gspo"})


def _clip(option: Option, given: Given) -> Outcome:
    loss = "gspo" if _is_gspo(given) else "clip"
    if given["loss_type"].value in ("cispo", "sapo"):
        return same(f"no limit of {given['loss_type'].value}")
    high = given["epsilon_high"] if "epsilon_high" in given else given["epsilon"]
    return clip_limits(loss, given["epsilon"].value, high.value, "the upper limit is 0.28 by default here" * (loss == "clip"))


def _beta(option: Option, given: Given) -> Outcome:
    if not option.number:
        return same("0: no reference model is loaded")
    if given.method == "rloo":
        return to({"kl.coef": option.value, "kl.place": "reward"})
    estimator = "unbiased" if given.is_on("use_bias_correction_kl") else "k3"
    loss = given["loss_type"]
    mode = _LOSSES.get(loss.value, {}).get("algo.aggregation", "token-mean")
    if loss.value == "dr_grpo":
        mode = f"sequence-mean-token-sum-over({given['max_completion_length'].value})"
    settings = {"kl.coef": option.value, "kl.place": "loss", "kl.estimator": estimator}
    remark = "" if given.wrote("use_bias_correction_kl") else "use_bias_correction_kl is on there by default"
    return to(settings | ({"kl.aggregation": mode} if mode != "token-mean" else {}), remark)


def _of_beta(option: Option, given: Given) -> Outcome:
    return _beta(given["beta"], given)


def _scale(option: Option, given: Given) -> Outcome:
    if given["loss_type"].value == "dr_grpo":
        return same("dr_grpo does not scale")
    known = {"group": "group", "true": "group", "batch": "batch", "none": "none", "false": "none"}
    name = known.get(option.value.lower())
    return to({"algo.std": name}) if name else lost("scales here: group, batch, none")


def _correction(option: Option, given: Given) -> Outcome:
    if not given.is_on("use_vllm") or given["vllm_importance_sampling_correction"].is_off:
        return same("no correction is on")
    low, high = (given[f"vllm_importance_sampling_clip_{end}"].number for end in ("min", "max"))
    options = {
        "token_truncate": ("tis", {"low": low, "cap": high}),
        "token_mask": ("icepop", {"low": low or 0.0, "high": high}),
        "sequence_truncate": ("sequence_truncate", {"cap": high}),
        "sequence_mask": ("sequence_mask", {"low": low, "high": high}),
    }.get(given["vllm_importance_sampling_mode"].value)
    if options is None:
        return lost("modes here: token_truncate, token_mask, sequence_truncate, sequence_mask")
    return to({f"with.{options[0]}.{name}": value for name, value in options[1].items() if value is not None})


_FUNCTIONS: dict[str, dict[str, object]] = {
    "accuracy_reward": {"reward.accuracy_reward.name": "math_verifier"},
    "reasoning_accuracy_reward": {"reward.reasoning_accuracy_reward.name": "math_verifier"},
    "think_format_reward": {
        "reward.think_format_reward.name": "format",
        "reward.think_format_reward.pattern": "<think>(?!.*<think>).*?</think>.*",
    },
    "get_soft_overlong_punishment": {"with.overlong_penalty.max_length": 1280, "with.overlong_penalty.buffer": 256},
}
"""TRL's own reward functions."""


def _functions(option: Option, given: Given) -> Outcome:
    settings: dict[str, object] = {}
    for name in option.items:
        module, _, function = name.rpartition(".") if name.replace(".", "_").isidentifier() else ("", "", name)
        own = rewards(f"{module.replace('.', '/')}.py:{function}").settings if module else {}
        settings |= _FUNCTIONS.get(name, own)
    unknown = [
        name for name in option.items if name not in _FUNCTIONS and not ("." in name and name.replace(".", "_").isidentifier())
    ]
    remark = f"{', '.join(unknown)} is no function of TRL's, and no import path" if unknown else ""
    return to(settings, remark) if settings else lost(remark)


def _weights(option: Option, given: Given) -> Outcome:
    model = ["reward_model"] if "reward_model_name_or_path" in given else []
    names = [*model, *given["reward_funcs"].items]
    if len(names) != len(option.items):
        return lost(f"{len(option.items)} weights for {len(names)} rewards")
    settings = {}
    for name, weight in zip(names, option.items, strict=True):
        penalty = name == "get_soft_overlong_punishment"
        settings["with.overlong_penalty.factor" if penalty else f"reward.{name.rpartition('.')[2]}.weight"] = weight
    return to(settings)


def _vllm(name: str) -> Convert:
    return lambda option, given: (
        to({f"engine.{name}": option.value or True}) if given.is_on("use_vllm") else same("no vLLM samples")
    )


def _refused(usual: float) -> Convert:
    return lambda option, given: (
        same("off") if option.number == usual or option.is_off else lost("training refuses it: it could not correct for it")
    )


_OF_ROLLOUTS: Table = {
    PROGRAM: _program,
    "num_generations": _generations,
    "generation_batch_size": _batch,
    "steps_per_generation": _batch,
    "max_prompt_length": lambda option, given: to({"data.max_prompt_tokens": option.value, "data.long_prompts": "truncate"}),
    "top_p": _refused(1),
    "top_k": _refused(0),
    "min_p": _refused(0),
    "repetition_penalty": _refused(1),
    "loss_type": _loss,
    "importance_sampling_level": _level,
    "epsilon": _clip,
    "epsilon_high": _clip,
    "delta": lambda option, given: to({"algo.dual_clip": None if option.is_off else option.value}),
    "beta": _beta,
    "use_bias_correction_kl": _of_beta,
    "scale_rewards": _scale,
    "multi_objective_aggregation": _program,
    "normalize_advantages": switch({"algo.name": "reinforce_pp_baseline"}, "RLOO has no whitening here"),
    "reward_funcs": _functions,
    "reward_weights": _weights,
    "off_policy_mask_threshold": lambda option, given: (
        same("off, as it is here") if option.is_off else to({"with.off_policy_mask.delta": option.value})
    ),
    "use_vllm": switch({"engine.name": "vllm"}),
    "vllm_mode": lambda option, given: (
        same("engines belong to the run")
        if option.value == "colocate"
        else lost("engines belong to the run: --placement rollout=N")
    ),
    "vllm_gpu_memory_utilization": _vllm("gpu_memory_utilization"),
    "vllm_tensor_parallel_size": _vllm("tensor_parallel_size"),
    "vllm_enable_sleep_mode": _vllm("sleep"),
    "vllm_max_model_length": _vllm("max_model_len"),
    **{f"vllm_importance_sampling_{name}": _correction for name in ("correction", "mode", "clip_min", "clip_max")},
}

# --- dpo, sft, kto, reward ----------------------------------------------------------------------


def _preference(option: Option, given: Given) -> Outcome:
    if len(option.items) != 1:
        return lost("one loss at a time here")
    return to({"algo.loss": option.value})


def _of_answers(option: Option, given: Given) -> Outcome:
    """Whether only answers are trained."""
    if option.is_off and option.values:
        return lost("prompts and messages of the user are trained there too; here only answers are")
    return same("only answers are trained here")


_OF_ROWS: Table = {
    "assistant_only_loss": _of_answers,
    "completion_only_loss": _of_answers,
    "beta": key("algo.beta"),
    "loss_type": _preference,
    "eos_token": never("answers end as the tokenizer and its chat template say"),
}
