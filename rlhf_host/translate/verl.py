"""verl's options where value or meaning differ from ours, and its defaults."""

from __future__ import annotations

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
    shown,
    switch,
    to,
    todo,
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
    sources,
    warmup,
)

ALIASES = {
    "custom_reward_function.path": "reward.custom_reward_function.path",
    "custom_reward_function.name": "reward.custom_reward_function.name",
    "reward_model.enable": "reward.reward_model.enable",
    "reward_model.model.path": "reward.reward_model.model_path",
    "actor_rollout_ref.actor.optim.warmup_style": "actor_rollout_ref.actor.optim.lr_scheduler_type",
}

_ACTOR, _ROLLOUT, _MODEL = (f"actor_rollout_ref.{name}." for name in ("actor", "rollout", "model"))

_DEFAULTS: Defaults = {
    "algorithm.adv_estimator": ("gae",),
    "algorithm.gamma": ("1.0",),
    "algorithm.lam": ("1.0",),
    "algorithm.kl_ctrl.kl_coef": ("0.001",),
    "algorithm.rollout_correction.rollout_is_threshold": ("2.0",),
    "data.prompt_key": ("prompt",),
    "data.max_prompt_length": ("512",),
    "data.max_response_length": ("512",),
    "data.train_batch_size": ("1024",),
    "reward.custom_reward_function.name": ("compute_score",),
    f"{_ROLLOUT}n": ("1",),
    f"{_ROLLOUT}temperature": ("1.0",),
    f"{_ROLLOUT}tensor_model_parallel_size": ("2",),
    f"{_ROLLOUT}gpu_memory_utilization": ("0.5",),
    f"{_ROLLOUT}free_cache_engine": ("true",),
    f"{_ROLLOUT}max_num_seqs": ("256",),
    f"{_ROLLOUT}val_kwargs.temperature": ("0",),
    f"{_ROLLOUT}val_kwargs.n": ("1",),
    f"{_ROLLOUT}val_kwargs.do_sample": ("false",),
    f"{_ACTOR}strategy": ("fsdp",),
    f"{_ACTOR}ppo_mini_batch_size": ("256",),
    f"{_ACTOR}ppo_epochs": ("1",),
    f"{_ACTOR}clip_ratio_low": ("0.2",),
    f"{_ACTOR}clip_ratio_high": ("0.2",),
    f"{_ACTOR}clip_ratio_c": ("3.0",),
    f"{_ACTOR}loss_agg_mode": ("token-mean",),
    f"{_ACTOR}entropy_coeff": ("0",),
    f"{_ACTOR}use_kl_loss": ("false",),
    f"{_ACTOR}kl_loss_coef": ("0.001",),
    f"{_ACTOR}kl_loss_type": ("low_var_kl",),
    f"{_ACTOR}grad_clip": ("1.0",),
    f"{_ACTOR}optim.lr": ("1e-06",),
    f"{_ACTOR}optim.weight_decay": ("0.01",),
    f"{_ACTOR}optim.betas": ("0.9", "0.999"),
    f"{_MODEL}enable_gradient_checkpointing": ("true",),
    f"{_MODEL}lora_alpha": ("16",),
    "critic.optim.lr": ("1e-05",),
    "critic.optim.weight_decay": ("0.01",),
    "critic.optim.betas": ("0.9", "0.999"),
    "critic.cliprange_value": ("0.5",),
    "critic.model.path": ("~/models/deepseek-llm-7b-chat",),
    "trainer.n_gpus_per_node": ("8",),
    "trainer.nnodes": ("1",),
    "trainer.total_epochs": ("30",),
    "trainer.save_freq": ("-1",),
    "trainer.test_freq": ("-1",),
    "trainer.val_before_train": ("true",),
    "trainer.logger": ("console", "wandb"),
    "trainer.project_name": ("verl_examples",),
    "trainer.max_actor_ckpt_to_keep": ("null",),
}


def defaults(method: str) -> Defaults:
    return _DEFAULTS


def convert(method: str) -> Table:
    return LAUNCH | _TABLE


_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?([\w.]+)(?:,\s*([^}]*))?\}")


def resolved(options: Sequence[Option]) -> list[Option]:
    """Values that refer to other options, such as ``${oc.select:a.b,1}``, as their values."""
    values = {option.name: option.values for option in options}

    def look_up(option: Option, values_of: tuple[str, ...], depth: int) -> tuple[str, ...]:
        if depth > 8 or len(values_of) != 1:
            return values_of
        match = _REFERENCE.fullmatch(values_of[0])
        if match is None:
            return (_REFERENCE.sub(lambda inside: " ".join(look_up(option, (inside[0],), depth + 1)), values_of[0]),)
        name = f"{option.name.rpartition('.')[0]}{match[1]}" if match[1].startswith(".") else match[1]
        found = values.get(name, _DEFAULTS.get(name))
        return look_up(option, found, depth + 1) if found is not None else (match[2] or "null",)

    return [replace(option, values=look_up(option, option.values, 0)) for option in options]


# --- the batch ----------------------------------------------------------------------------------


def _minibatches(option: Option, given: Given) -> Outcome:
    batches = given.number("data.train_batch_size") / max(1.0, given.number(f"{_ACTOR}ppo_mini_batch_size", 1))
    prompts = (
        f"{given['data.train_batch_size'].value} / {given[f'{_ACTOR}ppo_mini_batch_size'].value} prompts{rounded(batches)}"
    )
    return to({"train.minibatches": count(batches)}, prompts)


def _steps(option: Option, given: Given) -> Outcome:
    return to({"train.steps": option.value}) if "trainer.total_training_steps" in given else same("passes count")


def _passes(option: Option, given: Given) -> Outcome:
    if "trainer.total_training_steps" in given:
        return same("trainer.total_training_steps overrides it")
    return run_steps(
        option,
        given.number("data.train_batch_size"),
        rows_of(given["data.train_files"].items),
        given.number("data.train_max_samples"),
    )


def _every(name: str) -> Convert:
    return lambda option, given: to({name: max(0, int(option.number or 0))})


# --- the algorithm ------------------------------------------------------------------------------

_ESTIMATORS = {
    "gae": "ppo",
    "grpo": "grpo",
    "rloo": "rloo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
}


def _estimator(option: Option, given: Given) -> Outcome:
    if option.value not in _ESTIMATORS:
        return todo("algo.name", f"no algorithm here does what {option.value} does there")
    return to({"algo.name": _ESTIMATORS[option.value]})


def _has_critic(given: Given) -> bool:
    return given["algorithm.adv_estimator"].value == "gae"


def _of_critic(convert: Convert) -> Convert:
    return lambda option, given: convert(option, given) if _has_critic(given) else same("no critic is trained")


def _discount(name: str) -> Convert:
    def convert(option: Option, given: Given) -> Outcome:
        if _has_critic(given) or (name == "gamma" and given["algorithm.adv_estimator"].value == "reinforce_plus_plus"):
            return to({f"algo.{name}": option.value})
        return same("1: no discount") if option.number == 1 else lost("the algorithm discounts nothing here")

    return convert


_KINDS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
"""Estimators of the KL."""


def _kl(option: Option, given: Given) -> Outcome:
    """The penalty of both places, of which a run here has one."""
    if given.is_on(f"{_ACTOR}use_kl_loss"):
        return _kl_loss(option, given)
    if not given.is_on("algorithm.use_kl_in_reward"):
        return same("not used, because algorithm.use_kl_in_reward is off")
    settings: dict[str, object] = {"kl.coef": given["algorithm.kl_ctrl.kl_coef"].value, "kl.place": "reward"}
    kind = _KINDS.get(given["algorithm.kl_penalty"].value, "k1")
    settings |= {"kl.estimator": kind, "kl.force": True} if kind != "k1" else {}
    if given["algorithm.kl_ctrl.type"].value == "adaptive":
        settings |= {"kl.controller": "adaptive", "kl.target": given.number("algorithm.kl_ctrl.target_kl", 0.1)}
        settings |= {"kl.horizon": int(given.number("algorithm.kl_ctrl.horizon", 10000))}
    return to(settings)


def _kl_loss(option: Option, given: Given) -> Outcome:
    if not given.is_on(f"{_ACTOR}use_kl_loss"):
        return same("not used, because use_kl_loss is off")
    kind = given[f"{_ACTOR}kl_loss_type"].value
    if kind not in _KINDS:
        return lost(f"estimators that are known here: {', '.join(_KINDS)}")
    settings = {"kl.coef": given[f"{_ACTOR}kl_loss_coef"].value, "kl.place": "loss", "kl.estimator": _KINDS[kind]}
    mode = _aggregation(given)
    return to(settings | ({"kl.aggregation": mode} if mode not in (None, "token-mean") else {}))


def _kl_in_reward(option: Option, given: Given) -> Outcome:
    if given.is_on(f"{_ACTOR}use_kl_loss") and given.is_on("algorithm.use_kl_in_reward"):
        return lost("a run has one KL penalty here, and the one in the loss is taken")
    if given.is_on(f"{_ACTOR}use_kl_loss"):
        return same("the KL penalty is in the loss")
    return _kl(option, given)


_MODES = {
    "token-mean": "token-mean",
    "seq-mean-token-mean": "sequence-mean-token-mean",
    "seq-mean-token-sum": "sequence-mean-token-sum",
}

_LOSSES = {"vanilla": "clip", "gpg": "pg", "gspo": "gspo", "sapo": "sapo", "cispo": "cispo", "dppo_tv": "dppo_tv"}


def _aggregation(given: Given) -> str | None:
    mode = given[f"{_ACTOR}loss_agg_mode"].value
    if mode == "seq-mean-token-sum-norm":
        length = given.number(f"{_ACTOR}loss_scale_factor", given.number("data.max_response_length"))
        return f"sequence-mean-token-sum-over({shown(length)})"
    return _MODES.get(mode)


def _mode(option: Option, given: Given) -> Outcome:
    mode = _aggregation(given)
    if mode is None:
        return lost(f"aggregations that are known here: {', '.join(_MODES)}, seq-mean-token-sum-norm")
    return aggregation(given[f"{_ACTOR}policy_loss.loss_mode"].value, mode)


def _loss(option: Option, given: Given) -> Outcome:
    return (
        to({"algo.loss": _LOSSES[option.value]})
        if option.value in _LOSSES
        else lost(f"losses that are known here: {', '.join(_LOSSES)}")
    )


def _clips(option: Option, given: Given) -> Outcome:
    low, high = (given[f"{_ACTOR}clip_ratio_{end}"].value for end in ("low", "high"))
    limits = clip_limits(given[f"{_ACTOR}policy_loss.loss_mode"].value, low, high).settings
    return to({name: value for name, value in limits.items() if name.endswith("_high") == option.name.endswith("_high")})


def _clip(option: Option, given: Given) -> Outcome:
    if given.wrote(f"{_ACTOR}clip_ratio_low", f"{_ACTOR}clip_ratio_high"):
        return same("both limits are given")
    return lost("clip_ratio_low and clip_ratio_high, 0.2 by default, override it in verl 0.9.1: set them")


def _correction(option: Option, given: Given) -> Outcome:
    kind, cap = (given[f"algorithm.rollout_correction.{name}"].value for name in ("rollout_is", "rollout_is_threshold"))
    name = {"token": "tis", "sequence": "sequence_truncate"}.get(kind)
    return to({f"with.{name}.cap": cap}) if name else same("no correction is on")


def _bypass(option: Option, given: Given) -> Outcome:
    if option.is_off:
        return same("off, as it is here")
    if given[f"{_ACTOR}policy_loss.loss_mode"].value == "gspo":
        return lost("gspo needs recomputed probabilities here: the sampler's rounding is as large as its limits")
    return to({"train.old_logprobs": "sampler"})


# --- rewards, data, machines --------------------------------------------------------------------


def _reward_function(option: Option, given: Given) -> Outcome:
    path = given["reward.custom_reward_function.path"]
    if path.is_off:
        return same("no function is given")
    name = given["reward.custom_reward_function.name"].value
    return rewards(f"{path.value}:{name}")


def _reward_model(option: Option, given: Given) -> Outcome:
    if not given.is_on("reward.reward_model.enable"):
        return same("no reward model is loaded")
    settings = {"reward.reward_model.name": "reward_model"}
    return to(settings | {"reward_model.model": given["reward.reward_model.model_path"].value})


def _program(option: Option, given: Given) -> Outcome:
    if "reward.custom_reward_function.path" in given or given.is_on("reward.reward_model.enable"):
        return same("the reward is given")
    remark = "verl chooses a function for each row by its data_source; this one compares answers of mathematics"
    return to({"reward.math_verifier.name": "math_verifier"}, remark)


def _agent(option: Option, given: Given) -> Outcome:
    known = {"single_turn_agent": "single_turn", "tool_agent": "multi_turn"}
    return to({"agent.name": known[option.value]}) if option.value in known else lost("an agent of your own: --agent FILE.py")


def _data(place: str) -> Convert:
    return lambda option, given: to({f"{place}.sources": sources(option.items)})


def _shards(option: Option, given: Given) -> Outcome:
    if option.value not in ("fsdp", "fsdp2"):
        return lost("backends here: torch, deepspeed")
    return to({"backend.name": "deepspeed", "backend.zero_stage": 3}, "weights are split over all ranks, as by ZeRO 3")


def _place(option: Option, given: Given) -> Outcome:
    nodes, each = (int(given.number(f"trainer.{name}", 1)) for name in ("nnodes", "n_gpus_per_node"))
    return to({"runtime.name": "ray", "placement": [f"actor+rollout={f'{nodes}x' if nodes > 1 else ''}{each}"]})


def _engine(option: Option, given: Given) -> Outcome:
    known = {"vllm": "vllm", "hf": "transformers"}
    return to({"engine.name": known[option.value]}) if option.value in known else lost("engines here: vllm, transformers")


def _of_vllm(name: str) -> Convert:
    def convert(option: Option, given: Given) -> Outcome:
        vllm = given[f"{_ROLLOUT}name"].value == "vllm"
        return to({f"engine.{name}": option.value}) if vllm else same("no vLLM samples")

    return convert


def _trackers(option: Option, given: Given) -> Outcome:
    known = {f"tracker.{name}.name": name for name in option.items if name in ("wandb", "tensorboard")}
    others = [name for name in option.items if name not in ("wandb", "tensorboard", "console")]
    if others and not known:
        return lost(f"no tracker here is called {', '.join(others)}")
    return to(known, f"without {', '.join(others)}" if others else "") if known else same("the console is always there")


def _project(option: Option, given: Given) -> Outcome:
    return to({"tracker.wandb.project": option.value}) if "wandb" in given["trainer.logger"].items else same("no wandb")


def _val_temperature(option: Option, given: Given) -> Outcome:
    sampled = given.is_on(f"{_ROLLOUT}val_kwargs.do_sample")
    return to({"eval.temperature": given[f"{_ROLLOUT}val_kwargs.temperature"].value if sampled else "0"})


def _warmup(option: Option, given: Given) -> Outcome:
    if option.name.endswith("ratio"):
        return warmup("actor", option.number or 0.0, None)
    return to({"actor.warmup_steps": int(option.number or 0)}) if (option.number or 0) > 0 else same("no warm-up in steps")


def _lora(name: str) -> Convert:
    def convert(option: Option, given: Given) -> Outcome:
        if not given.number(f"{_MODEL}lora_rank"):
            return same("no adapter is trained")
        return to({f"actor.lora.{name}": option.items if name == "targets" else option.value})

    return convert


def _betas(role: str) -> Convert:
    return lambda option, given: to({f"{role}.betas": [float(item) for item in option.items]})


def _truncation(option: Option, given: Given) -> Outcome:
    known = {"left": "truncate", "error": "filter"}
    if option.value not in known:
        return lost("long prompts are left out here, or lose their beginning")
    return to({"data.long_prompts": known[option.value]}, "longer prompts are left out" if option.value == "error" else "")


_TABLE: Table = {
    PROGRAM: _program,
    "data.train_files": _data("data"),
    "data.val_files": _data("eval.data"),
    "data.filter_overlong_prompts": always("longer prompts are left out"),
    "data.truncation": _truncation,
    "data.max_prompt_length": key("data.max_prompt_tokens"),
    "data.seed": lambda option, given: to({"seed": option.value}) if not option.is_off else same("the run's seed"),
    "data.train_max_samples": lambda option, given: (
        to({"data.max_samples": option.value}) if (option.number or -1) > 0 else same("all rows")
    ),
    f"{_ACTOR}ppo_mini_batch_size": _minibatches,
    f"{_ACTOR}clip_ratio": _clip,
    f"{_ACTOR}clip_ratio_low": _clips,
    f"{_ACTOR}clip_ratio_high": _clips,
    f"{_ACTOR}use_kl_loss": _kl_loss,
    f"{_ACTOR}kl_loss_coef": _kl_loss,
    f"{_ACTOR}kl_loss_type": _kl_loss,
    f"{_ACTOR}loss_agg_mode": _mode,
    f"{_ACTOR}policy_loss.loss_mode": _loss,
    f"{_ACTOR}strategy": _shards,
    f"{_ACTOR}fsdp_config.grad_offload": always("gradients stay with the optimizer"),
    f"{_ACTOR}optim.lr_scheduler_type": schedule("actor"),
    f"{_ACTOR}optim.lr_warmup_steps": _warmup,
    f"{_ACTOR}optim.lr_warmup_steps_ratio": _warmup,
    f"{_ACTOR}optim.betas": _betas("actor"),
    f"{_MODEL}enable_gradient_checkpointing": lambda option, given: to({"actor.gradient_checkpointing": not option.is_off}),
    f"{_MODEL}trust_remote_code": switch({"actor.trust_remote_code": True}),
    f"{_MODEL}override_config.attn_implementation": attention,
    f"{_MODEL}lora_rank": _lora("rank"),
    f"{_MODEL}lora_alpha": _lora("alpha"),
    f"{_MODEL}target_modules": _lora("targets"),
    f"{_ROLLOUT}name": _engine,
    f"{_ROLLOUT}agent.default_agent_loop": _agent,
    f"{_ROLLOUT}tensor_model_parallel_size": _of_vllm("tensor_parallel_size"),
    f"{_ROLLOUT}gpu_memory_utilization": _of_vllm("gpu_memory_utilization"),
    f"{_ROLLOUT}enforce_eager": _of_vllm("enforce_eager"),
    f"{_ROLLOUT}free_cache_engine": _of_vllm("sleep"),
    f"{_ROLLOUT}enable_prefix_caching": _of_vllm("enable_prefix_caching"),
    f"{_ROLLOUT}max_num_seqs": _of_vllm("max_num_seqs"),
    f"{_ROLLOUT}max_model_len": lambda option, given: (
        same("as the model says") if option.is_off else _of_vllm("max_model_len")(option, given)
    ),
    f"{_ROLLOUT}top_p": lambda option, given: same("off") if option.number == 1 else lost("training refuses it"),
    f"{_ROLLOUT}top_k": lambda option, given: same("off") if (option.number or 0) <= 0 else lost("training refuses it"),
    f"{_ROLLOUT}val_kwargs.temperature": _val_temperature,
    f"{_ROLLOUT}val_kwargs.do_sample": _val_temperature,
    f"{_ROLLOUT}val_kwargs.top_k": lambda option, given: to({"eval.top_k": max(0, int(option.number or 0))}),
    "algorithm.adv_estimator": _estimator,
    "algorithm.gamma": _discount("gamma"),
    "algorithm.lam": _discount("lam"),
    "algorithm.norm_adv_by_std_in_grpo": lambda option, given: (
        to({"algo.std": "none"}) if option.is_off else same("on, as it is here")
    ),
    "algorithm.use_kl_in_reward": _kl_in_reward,
    "algorithm.kl_penalty": _kl_in_reward,
    "algorithm.kl_ctrl.kl_coef": _kl_in_reward,
    "algorithm.kl_ctrl.type": _kl_in_reward,
    "algorithm.kl_ctrl.target_kl": _kl_in_reward,
    "algorithm.kl_ctrl.horizon": _kl_in_reward,
    "algorithm.rollout_correction.rollout_is": _correction,
    "algorithm.rollout_correction.rollout_is_threshold": _correction,
    "algorithm.rollout_correction.bypass_mode": _bypass,
    "algorithm.filter_groups.enable": switch({"with.dynamic_filtering.name": "dynamic_filtering"}),
    "reward.custom_reward_function.path": _reward_function,
    "reward.custom_reward_function.name": _reward_function,
    "reward.reward_model.enable": _reward_model,
    "reward.reward_model.model_path": _reward_model,
    "critic.model.path": _of_critic(key("critic.model")),
    "critic.optim.lr": _of_critic(key("critic.lr")),
    "critic.optim.weight_decay": _of_critic(key("critic.weight_decay")),
    "critic.optim.betas": _of_critic(_betas("critic")),
    "critic.cliprange_value": _of_critic(key("algo.value_clip")),
    "trainer.critic_warmup": _of_critic(key("algo.critic_warmup")),
    "trainer.total_training_steps": _steps,
    "trainer.total_epochs": _passes,
    "trainer.nnodes": _place,
    "trainer.n_gpus_per_node": _place,
    "trainer.save_freq": _every("checkpoint.every"),
    "trainer.test_freq": _every("eval.every"),
    "trainer.max_actor_ckpt_to_keep": lambda option, given: to({"checkpoint.keep": int(option.number or 0)}),
    "trainer.logger": _trackers,
    "trainer.project_name": _project,
    "trainer.resume_mode": lambda option, given: (
        same("a run begins anew") if option.value == "disable" else lost("to go on with a run: rlhf train --resume RUN_DIR")
    ),
    "--config_path": never("hydra's own files are not read: translate them too"),
    "--config_name": never("hydra's own files are not read: translate them too"),
}
