"""The options of OpenRLHF's train_ppo_ray."""

from __future__ import annotations

from rlhf_host.plugins.selection import split_names
from rlhf_host.translate.openrlhf_common import COMMON, betas, data
from rlhf_host.translate.options import (
    Convert,
    Defaults,
    Given,
    Option,
    Outcome,
    Table,
    count,
    key,
    lost,
    rounded,
    same,
    shown,
    switch,
    to,
    todo,
)
from rlhf_host.translate.shared import aggregation, clip_limits, rewards, rows_of, run_steps, schedule, scheduled_warmup

DEFAULTS: Defaults = COMMON | {
    "algo.advantage.estimator": ("gae",),
    "actor.num_nodes": ("1",),
    "actor.num_gpus_per_node": ("8",),
    "critic.num_nodes": ("1",),
    "critic.num_gpus_per_node": ("8",),
    "ref.num_nodes": ("1",),
    "ref.num_gpus_per_node": ("8",),
    "reward.num_nodes": ("1",),
    "reward.num_gpus_per_node": ("8",),
    "vllm.tensor_parallel_size": ("1",),
    "vllm.gpu_memory_utilization": ("0.95",),
    "vllm.enable_prefix_caching": ("False",),
    "algo.advantage.is_correction_mode": ("mask",),
    "algo.advantage.is_correction_threshold": ("0.5", "5.0"),
    "rollout.batch_size": ("1024",),
    "rollout.n_samples_per_prompt": ("1",),
    "rollout.max_new_tokens": ("None",),
    "train.max_epochs": ("1",),
    "train.num_episodes": ("1",),
    "data.input_key": ("input",),
    "data.max_len": ("2048",),
    "actor.eps_clip": ("0.2",),
    "actor.dual_clip": ("None",),
    "actor.adam.lr": ("1e-06",),
    "critic.adam.lr": ("9e-06",),
    "critic.lr_scheduler": ("cosine_with_min_lr",),
    "critic.lr_warmup_ratio": ("0.03",),
    "critic.min_lr_ratio": ("0.1",),
    "critic.value_clip": ("0.5",),
    "algo.advantage.lambd": ("1",),
    "algo.advantage.gamma": ("1",),
    "algo.kl.init_coef": ("0.01",),
    "algo.kl.estimator": ("k1",),
    "algo.kl.horizon": ("10000",),
    "reward.clip_range": ("-10", "10"),
    "reward.overlong_penalty_factor": ("1",),
    "algo.dynamic_filtering_range": ("0", "1"),
    "eval.split": ("train",),
    "eval.temperature": ("0.6",),
    "eval.n_samples_per_prompt": ("4",),
}

_ROLES = {"actor": "actor", "critic": "critic", "reference": "ref", "reward": "reward"}
"""Ours → theirs."""


def _roles(given: Given) -> list[str]:
    """Models that the run loads."""
    there = {
        "critic": given["algo.advantage.estimator"].value == "gae",
        "reference": given.number("algo.kl.init_coef") > 0,
        "reward": "reward.model_name_or_path" in given and not given.wrote("train.agent_func_path"),
    }
    return [role for role in _ROLES if there.get(role, True)]


def _placement(given: Given) -> list[str]:
    roles = _roles(given)
    engines = int(given.number("vllm.num_engines")) * int(given.number("vllm.tensor_parallel_size", 1))
    groups = [[role] for role in roles]
    if given.is_on("train.colocate_all"):
        groups = [roles]
    for switch_on, pair in (("train.colocate_actor_ref", "actor reference"), ("train.colocate_critic_reward", "critic reward")):
        together = [role for role in pair.split() if role in roles]
        if given.is_on(switch_on) and together and len(groups) > 1:
            groups = [group for group in groups if group[0] not in together] + [together]
    entries = [(group, _devices(_ROLES[group[0]], given)) for group in groups]
    if given.is_on("train.colocate_all") and not given.is_on("train.async_enable"):
        entries[0][0].append("rollout")
    elif engines:
        entries.append((["rollout"], str(engines)))
    return [f"{'+'.join(group)}={devices}" for group, devices in entries]


def _devices(role: str, given: Given) -> str:
    nodes, each = (int(given.number(f"{role}.{name}", 1)) for name in ("num_nodes", "num_gpus_per_node"))
    return f"{nodes}x{each}" if nodes > 1 else str(each)


def _place(role: str) -> Convert:
    def convert(option: Option, given: Given) -> Outcome:
        if role not in _roles(given):
            return same(f"no {role} model is loaded")
        return to({"runtime.name": "ray", "placement": _placement(given)})

    return convert


def _together(option: Option, given: Given) -> Outcome:
    return to({"runtime.name": "ray", "placement": _placement(given)}) if not option.is_off else same("off, as it is here")


def _engines(option: Option, given: Given) -> Outcome:
    if not option.number:
        return same("the trainer's own model samples")
    return to({"engine.name": "vllm", "runtime.name": "ray", "placement": _placement(given)})


def _vllm(name: str) -> Convert:
    def convert(option: Option, given: Given) -> Outcome:
        if not given.number("vllm.num_engines"):
            return same("no vLLM samples")
        value: object = not option.is_off if not option.values or option.is_on or option.is_off else option.value
        if option.name.endswith("tensor_parallel_size"):
            value = option.value
        return to({"engine.name": "vllm", f"engine.{name}": value})

    return convert


def _minibatches(given: Given) -> float:
    samples = given.number("rollout.batch_size") * given.number("rollout.n_samples_per_prompt", 1)
    return samples / max(1.0, given.number("train.batch_size", 1))


def _train_batch(option: Option, given: Given) -> Outcome:
    batches = _minibatches(given)
    samples = f"{shown(given.number('rollout.batch_size'))} prompts × {given['rollout.n_samples_per_prompt'].value} samples"
    return to({"train.minibatches": count(batches)}, f"{samples} / {option.value} per update{rounded(batches)}")


def _episodes(option: Option, given: Given) -> Outcome:
    rows = None if "data.prompt_probs" in given else rows_of(given["data.prompt_dataset"].items)
    return run_steps(option, given.number("rollout.batch_size"), rows, given.number("data.max_samples"))


def _warmup(role: str) -> Convert:
    def convert(option: Option, given: Given) -> Outcome:
        if role not in _roles(given):
            return same(f"no {role} is trained")
        steps = _episodes(given["train.num_episodes"], given).settings.get("train.steps")
        updates = steps and steps * count(_minibatches(given)) * int(given.number("train.max_epochs", 1))
        return scheduled_warmup(role, given[f"{role}.lr_scheduler"], option.number or 0.0, updates)

    return convert


def _of_critic(convert: Convert) -> Convert:
    return lambda option, given: convert(option, given) if "critic" in _roles(given) else same("no critic is trained")


def _critic_model(option: Option, given: Given) -> Outcome:
    return to({"critic.model": option.value}) if "critic" in _roles(given) else same("no critic is trained")


def _estimator(option: Option, given: Given) -> Outcome:
    known = {
        "gae": {"algo.name": "ppo", **({"algo.critic_from": "reward"} if "reward" in _roles(given) else {})},
        "reinforce": {"algo.name": "reinforce_pp"},
        "reinforce_baseline": {"algo.name": "reinforce_pp_baseline"},
        "rloo": {"algo.name": "rloo", "algo.kl_placement": "suffix"},
        "group_norm": {"algo.name": "grpo"},
        "dr_grpo": {"algo.name": "dr_grpo"},
    }
    if option.value not in known:
        return todo("algo.name", f"no algorithm here does what {option.value} does there")
    remark = "the critic starts from the reward model, as there" if "algo.critic_from" in known[option.value] else ""
    if option.value in ("group_norm", "dr_grpo") and "reference" in _roles(given) and not given.is_on("algo.kl.use_loss"):
        remark = (
            "there each token gets the KL from it to the end, after the group's statistics; here the KL is part of the reward"
        )
    return to(known[option.value], remark)


def _no_std(option: Option, given: Given) -> Outcome:
    if option.is_off:
        return same("off, as it is here")
    group = given["algo.advantage.estimator"].value == "group_norm"
    return to({"algo.std": "none"} if group else {"algo.whiten": "center"})


def _clip(option: Option, given: Given) -> Outcome:
    if "actor.eps_clip_low_high" in given:
        return same("both limits are given")
    remark = "both limits; the upper one is 0.28 by default here"
    return clip_limits(given["actor.policy_loss_type"].value, option.value, option.value, remark)


def _clips(option: Option, given: Given) -> Outcome:
    low, high = option.items
    return clip_limits(given["actor.policy_loss_type"].value, low, high)


def _discount(name: str) -> Convert:
    def convert(option: Option, given: Given) -> Outcome:
        algorithm = given["algo.advantage.estimator"].value
        if algorithm == "gae" or (name == "gamma" and algorithm == "reinforce"):
            return to({f"algo.{name}": option.value})
        return same("1: no discount") if option.number == 1 else lost(f"the algorithm of {algorithm} discounts nothing here")

    return convert


def _of_kl(convert: Convert) -> Convert:
    return lambda option, given: (
        convert(option, given) if "reference" in _roles(given) else same("not used, because algo.kl.init_coef is 0")
    )


def _kl_coef(option: Option, given: Given) -> Outcome:
    return to({"kl.coef": option.value}) if option.number else same("0: no reference model is loaded")


def _kl_estimator(option: Option, given: Given) -> Outcome:
    value = option.value
    if given.is_on("algo.kl.unbiased_gradient") or given.wrote("use_kl_estimator_k3"):
        return same("given by another option")
    if given.is_on("algo.kl.use_loss"):
        return to({"kl.estimator": value})
    return same("k1 in the reward, as it is here") if value == "k1" else to({"kl.estimator": value, "kl.force": True})


def _kl_target(option: Option, given: Given) -> Outcome:
    return to({"kl.controller": "adaptive", "kl.target": option.value}) if "algo.kl.target" in given else same("fixed")


def _kl_horizon(option: Option, given: Given) -> Outcome:
    return to({"kl.horizon": option.value}) if "algo.kl.target" in given else same("the coefficient is fixed")


def _reward_address(option: Option, given: Given) -> Outcome:
    return rewards(*split_names(option.value))


def _reward_model(option: Option, given: Given) -> Outcome:
    return to({"reward.reward_model.name": "reward_model", "reward_model.model": option.value})


def _normalize(option: Option, given: Given) -> Outcome:
    if option.is_off or "reward" not in _roles(given):
        return same("off, as it is here")
    return to({"reward.reward_model.normalize": "running"}, "there by mean and deviation kept in the reward model's files")


def _clip_reward(option: Option, given: Given) -> Outcome:
    low, high = map(float, option.items)
    if "reward" not in _roles(given):
        return lost("rewards of functions and agents are not clipped here")
    return to({"reward.reward_model.clip": high}) if low == -high else lost("limits are the same on both sides here")


def _correction(level: str, mode: str, given: Given) -> Outcome:
    if given["actor.policy_loss_type"].value == "gspo":
        return lost("with gspo there it puts the sampler into the ratio, whose rounding is as large as the limits")
    limits = [float(item) for item in given["algo.advantage.is_correction_threshold"].items]
    low, high = limits if len(limits) == 2 else (0.0, *limits)
    if given["algo.advantage.is_correction_gating"].value not in ("ratio", "none"):
        return lost("only ratios are gated here, not divergences")
    if level == "seq":
        name, options = "sequence_mask", {"statistic": "geometric", "low": low, "high": high, "token_weight": "token_truncated"}
    elif mode == "clip":
        name, options = "tis", {"low": low, "cap": high}
    else:
        name, options = "icepop", {"low": low, "high": high}
    remark = "weights of tokens that are kept are at most cap here" if level == "seq" else ""
    return to({f"with.{name}.{option}": value for option, value in options.items()}, remark)


def _correction_level(option: Option, given: Given) -> Outcome:
    if option.value == "off":
        return same("off, as it is here")
    return _correction(option.value, given["algo.advantage.is_correction_mode"].value, given)


def _old_correction(option: Option, given: Given) -> Outcome:
    """Of versions up to 0.9: one switch, and its kind."""
    if not given.is_on("enable_vllm_is_correction"):
        return same("no correction is on")
    kind = "icepop" if given.is_on("use_icepop") else given["vllm_is_correction_type"].value
    level, mode = {"icepop": ("token", "mask"), "seq-mask-tis": ("seq", "mask")}.get(kind, ("token", "clip"))
    return _correction(level, mode, given)


def _threshold(option: Option, given: Given) -> Outcome:
    if given.is_on("enable_vllm_is_correction"):
        return _old_correction(option, given)
    level = given["algo.advantage.is_correction_level"]
    return _correction_level(level, given) if level.value not in ("off", "none") else same("no correction is on")


def _stop_properly(option: Option, given: Given) -> Outcome:
    if option.number is None or option.number < 0:
        return lost("a fixed reward of truncated answers")
    return to({"with.stop_properly.coef": option.value})


def _overlong(option: Option, given: Given) -> Outcome:
    if "reward.overlong_buffer_len" not in given:
        return same("no length penalty is on")
    name = "factor" if option.name.endswith("factor") else "buffer"
    return to({f"with.overlong_penalty.{name}": option.value if name == "factor" else int(option.number or 0)})


def _filtering(option: Option, given: Given) -> Outcome:
    if not given.is_on("algo.dynamic_filtering_enable"):
        return same("no groups are dropped")
    low, high = given["algo.dynamic_filtering_range"].items
    return to({"with.dynamic_filtering.low": low, "with.dynamic_filtering.high": high})


def _longest(option: Option, given: Given) -> Outcome:
    """Of prompt and answer together; earlier versions have a limit for each."""
    if not option.line and given.wrote("prompt_max_len", "rollout.max_new_tokens"):
        return same("prompt and answer have limits of their own")
    return to({"rollout.max_tokens": option.value})


def _longest_answer(option: Option, given: Given) -> Outcome:
    if option.number is None:
        longest = count(given.number("data.max_len") - 1)
        return to({"rollout.max_new_tokens": longest}, "what data.max_len leaves, after a prompt of one token or more")
    return to({"rollout.max_new_tokens": option.value})


def _top_p(option: Option, given: Given) -> Outcome:
    return same("1: all tokens") if option.number == 1 else lost("training refuses top-p below 1: it could not correct for it")


def _evaluated(name: str) -> Convert:
    return lambda option, given: to({name: option.value}) if "eval.dataset" in given else same("nothing is evaluated")


def _freezing(option: Option, given: Given) -> Outcome:
    return to({"algo.critic_warmup": max(0, int(option.number or 0))})


def _async(option: Option, given: Given) -> Outcome:
    if not given.is_on("train.async_enable"):
        return same("off, as it is here")
    settings: dict[str, object] = {"async_depth": count(given.number("train.async_queue_size", 1))}
    if given["actor.policy_loss_type"].value != "gspo":
        return to(settings)
    settings |= {"train.old_logprobs": "recompute", "with.tis.name": "tis"}
    return to(settings, "gspo works only with recomputed log-probabilities, and sampling ahead needs a correction: tis")


def _aggregation(option: Option, given: Given) -> Outcome:
    return aggregation(given["actor.policy_loss_type"].value, option.value.replace("seq-", "sequence-"))


def _loss(option: Option, given: Given) -> Outcome:
    return to({"algo.loss": {"ppo": "clip"}.get(option.value, option.value)})


TABLE: Table = {
    **{f"{theirs}.{name}": _place(ours) for ours, theirs in _ROLES.items() for name in ("num_nodes", "num_gpus_per_node")},
    **{f"train.colocate_{name}": _together for name in ("all", "actor_ref", "critic_reward")},
    "vllm.num_engines": _engines,
    "vllm.tensor_parallel_size": _vllm("tensor_parallel_size"),
    "vllm.gpu_memory_utilization": _vllm("gpu_memory_utilization"),
    "vllm.enforce_eager": _vllm("enforce_eager"),
    "vllm.enable_prefix_caching": _vllm("enable_prefix_caching"),
    "vllm.enable_sleep": _vllm("sleep"),
    "ds.enable_sleep": _vllm("sleep"),
    "algo.advantage.estimator": _estimator,
    "algo.advantage.gamma": _discount("gamma"),
    "algo.advantage.lambd": _discount("lam"),
    "algo.advantage.no_std_norm": _no_std,
    "actor.policy_loss_type": _loss,
    "actor.loss_agg_mode": _aggregation,
    "actor.eps_clip": _clip,
    "actor.eps_clip_low_high": _clips,
    "actor.dual_clip": lambda option, given: to({"algo.dual_clip": None if option.number is None else option.value}),
    "critic.model_name_or_path": _critic_model,
    "critic.value_clip": _of_critic(key("algo.value_clip")),
    "critic.freezing_steps": _of_critic(_freezing),
    "critic.adam.lr": _of_critic(key("critic.lr")),
    "critic.adam.betas": _of_critic(betas("critic")),
    "critic.lr_scheduler": _of_critic(schedule("critic")),
    "critic.min_lr_ratio": _of_critic(key("critic.min_lr_ratio")),
    "critic.lr_warmup_ratio": _warmup("critic"),
    "actor.lr_warmup_ratio": _warmup("actor"),
    "algo.kl.init_coef": _kl_coef,
    "algo.kl.use_loss": _of_kl(switch({"kl.place": "loss"})),
    "algo.kl.estimator": _of_kl(_kl_estimator),
    "use_kl_estimator_k3": _of_kl(switch({"kl.estimator": "k3", "kl.force": True})),
    "algo.kl.unbiased_gradient": _of_kl(switch({"kl.estimator": "unbiased"})),
    "algo.kl.target": _of_kl(_kl_target),
    "algo.kl.horizon": _of_kl(_kl_horizon),
    "reward.model_name_or_path": _reward_model,
    "reward.remote_url": _reward_address,
    "reward.normalize_enable": _normalize,
    "reward.clip_range": _clip_reward,
    "reward.overlong_buffer_len": _overlong,
    "reward.overlong_penalty_factor": _overlong,
    "reward.stop_properly_penalty_coef": _stop_properly,
    "algo.advantage.is_correction_level": _correction_level,
    "algo.advantage.is_correction_mode": _threshold,
    "algo.advantage.is_correction_gating": _threshold,
    "algo.advantage.is_correction_threshold": _threshold,
    "enable_vllm_is_correction": _old_correction,
    "use_icepop": _old_correction,
    "vllm_is_correction_type": _old_correction,
    "algo.dynamic_filtering_enable": _filtering,
    "algo.dynamic_filtering_range": _filtering,
    "data.prompt_dataset": data("data.prompt_dataset", "data.prompt_probs", "data.prompt_split"),
    "data.prompt_probs": data("data.prompt_dataset", "data.prompt_probs", "data.prompt_split"),
    "data.prompt_split": data("data.prompt_dataset", "data.prompt_probs", "data.prompt_split"),
    "data.max_len": _longest,
    "rollout.max_new_tokens": _longest_answer,
    "rollout.top_p": _top_p,
    "train.batch_size": _train_batch,
    "train.num_episodes": _episodes,
    "train.async_enable": _async,
    "train.async_queue_size": _async,
    "eval.temperature": _evaluated("eval.temperature"),
    "eval.n_samples_per_prompt": _evaluated("eval.n"),
}
