"""The options of OpenRLHF's train_ppo_ray: batch, algorithm, KL penalty, rewards, lengths."""

from __future__ import annotations

from dataclasses import replace

from rlhf_host.settings import split_names
from rlhf_translate.openrlhf import correction, placement
from rlhf_translate.openrlhf.common import LATER, betas, data
from rlhf_translate.openrlhf.placement import roles
from rlhf_translate.options import (
    Convert,
    Given,
    Option,
    Outcome,
    Table,
    ask,
    count,
    key,
    lost,
    rounded,
    same,
    shown,
    switch,
    to,
)
from rlhf_translate.shared import (
    REPLAYED,
    aggregation,
    clip_limits,
    critic_first,
    reward_range,
    rewards,
    rows_of,
    run_steps,
    schedule,
    scheduled_warmup,
)

MATTERS = (
    "algo.advantage.estimator",
    "actor.num_nodes",
    "actor.num_gpus_per_node",
    "critic.num_nodes",
    "critic.num_gpus_per_node",
    "ref.num_nodes",
    "ref.num_gpus_per_node",
    "reward.num_nodes",
    "reward.num_gpus_per_node",
    "vllm.tensor_parallel_size",
    "vllm.gpu_memory_utilization",
    "vllm.enable_prefix_caching",
    "algo.advantage.is_correction_mode",
    "algo.advantage.is_correction_threshold",
    "rollout.batch_size",
    "rollout.n_samples_per_prompt",
    "rollout.max_new_tokens",
    "train.num_episodes",
    "data.input_key",
    "actor.eps_clip",
    "actor.dual_clip",
    "critic.adam.lr",
    "critic.lr_scheduler",
    "critic.lr_warmup_ratio",
    "critic.min_lr_ratio",
    "critic.value_clip",
    "algo.advantage.lambd",
    "algo.advantage.gamma",
    "algo.kl.init_coef",
    "algo.kl.estimator",
    "algo.kl.horizon",
    "train.ema_beta",
    "reward.clip_range",
    "reward.overlong_penalty_factor",
    "algo.dynamic_filtering_range",
    "eval.temperature",
    "eval.n_samples_per_prompt",
    "enable_vllm_is_correction",
    "vllm_is_correction_type",
    "algo.advantage.is_correction_type",
    "prompt_max_len",
)
"""Options whose defaults matter here, beside those of every program."""


_COUNTS_FROM_ZERO = (0, 9, 1)
"""The first version whose first step is 0."""


def _minibatches(given: Given) -> float:
    samples = given.many("rollout.batch_size") * given.many("rollout.n_samples_per_prompt")
    return samples / given.many("train.batch_size")


def _train_batch(option: Option, given: Given) -> Outcome:
    batches = _minibatches(given)
    samples = f"{shown(given.number('rollout.batch_size'))} prompts × {given['rollout.n_samples_per_prompt'].value} samples"
    return to({"train.minibatches": count(batches)}, f"{samples} / {option.value} per update{rounded(batches)}")


def _episodes(option: Option, given: Given) -> Outcome:
    rows = None if "data.prompt_probs" in given else rows_of(given["data.prompt_dataset"].texts)
    return run_steps(option, given.number("rollout.batch_size"), rows, given.number("data.max_samples"))


def _updates(given: Given) -> int:
    """Returns the optimizer updates in one of our steps."""
    return count(_minibatches(given)) * count(given.many("train.max_epochs"))


def _warmup(role: str) -> Convert:
    def convert(option: Option, given: Given) -> Outcome:
        if role not in roles(given):
            return same(f"no {role} is trained")
        steps = _episodes(given["train.num_episodes"], given).settings.get("train.steps")
        per_step = _updates(given)
        updates = steps and steps * per_step
        scheduler = given[f"{role}.lr_scheduler"] if f"{role}.lr_scheduler" in given else given["actor.lr_scheduler"]
        return scheduled_warmup(role, scheduler, option.number or 0.0, updates, per_step)

    return convert


def _of_critic(convert: Convert) -> Convert:
    return lambda option, given: convert(option, given) if "critic" in roles(given) else same("no critic is trained")


def _of_both(actor: Convert, critic: Convert) -> Convert:
    """Handles an option that up to 0.10.1 is for both actor and critic."""

    def convert(option: Option, given: Given) -> Outcome:
        own = actor(option, given)
        if given.version >= LATER or "critic" not in roles(given):
            return own
        others = critic(option, given)
        if own.asks is not None:
            return replace(own, asks=(*own.asks, *(others.asks or others.settings)))
        return replace(own, settings={**own.settings, **others.settings})

    return convert


def _estimator(option: Option, given: Given) -> Outcome:
    known: dict[str, dict[str, object]] = {
        "gae": {"algo.name": "ppo", **({"algo.critic_from": "reward"} if "reward" in roles(given) else {})},
        "reinforce": {"algo.name": "reinforce_pp"},
        "reinforce_baseline": {"algo.name": "reinforce_pp_baseline"},
        "rloo": {"algo.name": "rloo", "algo.kl_placement": "suffix"},
        "group_norm": {"algo.name": "grpo", "algo.std_eps": 1e-9},
        "dr_grpo": {"algo.name": "dr_grpo"},
    }
    if option.value not in known:
        return ask(f"no algorithm here does what {option.value} does there", "algo.name", algo="grpo")
    remark = "the critic starts from the reward model, as there" if "algo.critic_from" in known[option.value] else ""
    if option.value in ("group_norm", "dr_grpo") and "reference" in roles(given) and not given.is_on("algo.kl.use_loss"):
        remark = (
            "there each token gets the KL from it to the end, after the group's statistics; here the KL is part of the reward"
        )
    return to(known[option.value], remark)


def _no_std(option: Option, given: Given) -> Outcome:
    if option.is_off:
        return same("off, as it is here")
    group = given["algo.advantage.estimator"].value == "group_norm"
    return to({"algo.std": "none"} if group else {"algo.whiten": "center"})


def _policy_loss(given: Given) -> str:
    """Handles the loss, which has no option up to 0.8.7."""
    return given["actor.policy_loss_type"].value if "actor.policy_loss_type" in given else "ppo"


def _clip(option: Option, given: Given) -> Outcome:
    if "actor.eps_clip_low_high" in given:
        return same("both limits are given")
    remark = "both limits; the upper one is 0.28 by default here"
    return clip_limits(_policy_loss(given), option.value, option.value, remark)


def _clips(option: Option, given: Given) -> Outcome:
    low, high = option.pair
    return clip_limits(_policy_loss(given), low, high)


def _one_clip(option: Option, given: Given) -> Outcome:
    """Handles ``--clip_eps_low`` and ``--clip_eps_high``, which people write for the two numbers of OpenRLHF's option."""
    limits = clip_limits(_policy_loss(given), option.value, option.value).settings
    own = {name: value for name, value in limits.items() if name.endswith("_high") == option.name.endswith("_high")}
    return to(own, "OpenRLHF itself takes --eps_clip_low_high LOW HIGH")


def _discount(name: str) -> Convert:
    def convert(option: Option, given: Given) -> Outcome:
        algorithm = given["algo.advantage.estimator"].value
        if algorithm == "gae" or (name == "gamma" and algorithm == "reinforce"):
            return to({f"algo.{name}": option.value})
        if name == "lam":
            return same("only gae uses it, there too")
        return same("1: no discount") if option.number == 1 else lost(f"the algorithm of {algorithm} discounts nothing here")

    return convert


def _of_kl(convert: Convert) -> Convert:
    return lambda option, given: (
        convert(option, given) if "reference" in roles(given) else same("not used, because algo.kl.init_coef is not above 0")
    )


def _kl_coef(option: Option, given: Given) -> Outcome:
    return to({"kl.coef": option.value}) if (option.number or 0) > 0 else same("not above 0: no reference model is loaded")


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
    return rewards(*split_names(option.written))


def _reward_model(option: Option, given: Given) -> Outcome:
    if "train.agent_func_path" in given:
        return same("the agent gives the rewards")
    return to({"reward.reward_model.name": "reward_model", "reward_model.model": option.written})


def _normalize(option: Option, given: Given) -> Outcome:
    if option.is_off or "reward" not in roles(given):
        return same("off, as it is here" if option.is_off else "no reward model is loaded, whose rewards it is for")
    return to(
        {"reward.reward_model.normalize": "file"}, "mean and std in the model's config.json; without them it does nothing there"
    )


def _clip_reward(option: Option, given: Given) -> Outcome:
    low, high = option.pair
    if "reward" in roles(given) and low == -high:
        return to({"reward.reward_model.clip": high})
    grouped = given["algo.advantage.estimator"].value in ("rloo", "group_norm", "dr_grpo", "reinforce_baseline")
    return reward_range(low, high, "there after the group's baseline, here before it" if grouped else "")


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
    low, high = given["algo.dynamic_filtering_range"].pair
    return to({"with.dynamic_filtering.low": low, "with.dynamic_filtering.high": high})


def _longest(option: Option, given: Given) -> Outcome:
    """Returns the limit of prompt and answer together; earlier versions have a limit for each."""
    if option.number is None or (not option.line and given.wrote("prompt_max_len", "rollout.max_new_tokens")):
        return same("prompt and answer have limits of their own")
    return to({"rollout.max_tokens": option.value})


def _longest_answer(option: Option, given: Given) -> Outcome:
    if option.number is None:
        longest = count(given.number("data.max_len") - 1)
        return to({"rollout.max_new_tokens": longest}, "what data.max_len leaves, after a prompt of one token or more")
    return to({"rollout.max_new_tokens": option.value})


def _top_p(option: Option, given: Given) -> Outcome:
    return same("1: all tokens") if option.number == 1 else to({"rollout.top_p": option.written}, REPLAYED)


def _evaluated(name: str) -> Convert:
    return lambda option, given: to({name: option.written}) if "eval.dataset" in given else same("nothing is evaluated")


def _freezing(option: Option, given: Given) -> Outcome:
    """Handles the last step in which the actor does not learn; the first one is 1, and from 0.9.1 on it is 0."""
    from_zero = given.version >= _COUNTS_FROM_ZERO
    last = -1 if option.number is None else int(option.number)
    remark = f"OpenRLHF counts steps from 0, and step {last} is the last of them" if from_zero else ""
    return critic_first(max(0, last + from_zero), "critic" in roles(given), remark)


def _async(option: Option, given: Given) -> Outcome:
    if not given.is_on("train.async_enable"):
        return same("off, as it is here")
    settings: dict[str, object] = {"async_depth": count(given.number("train.async_queue_size", 1))}
    if _policy_loss(given) == "gspo":
        settings |= {"train.old_logprobs": "recompute", "with.tis.name": "tis"}
        return to(settings, "gspo works only with recomputed log-probabilities, and sampling ahead needs a correction: tis")
    if correction.is_on(given):
        return to(settings | {"train.old_logprobs": "recompute"}, "the correction is for recomputed log-probabilities")
    return to(settings, "the ratio compares with the sampler's log-probabilities here, which corrects for its age")


def _aggregation(option: Option, given: Given) -> Outcome:
    return aggregation(_policy_loss(given), option.value.replace("seq-", "sequence-"))


def _loss(option: Option, given: Given) -> Outcome:
    return to({"algo.loss": {"ppo": "clip"}.get(option.value, option.value)})


def _average(option: Option, given: Given) -> Outcome:
    """Handles the average of the weights: it moves after each update there (``moving_average``), and here after each step."""
    if not given.is_on("train.enable_ema"):
        return same("off, as it is here")
    updates, beta = _updates(given), given.number("train.ema_beta", 0.992)
    settings = {"with.ema.decay": float(f"{beta**updates:.12g}")}
    often = f"{shown(beta)} for each of {updates} updates there, once per step here; " if updates > 1 else ""
    return to(settings, f"{often}the average is the model that is saved there, here: rlhf export RUN_DIR --role ema")


def _pretraining(option: Option, given: Given) -> Outcome:
    """Handles the loss on a second data set, of which each sample's pass has a row (``PPO-ptx``)."""
    paths = given["pretrain_data"].texts if "pretrain_data" in given else []
    if not paths:
        return same("no pretraining data is given")
    if len(paths) > 1:
        return lost("the language modelling loss is on one data set here: put their rows together")
    rows = given.many("rollout.batch_size") * given.many("rollout.n_samples_per_prompt") * given.many("train.max_epochs")
    settings = {"with.ptx.data": paths[0], "with.ptx.coef": given.number("ptx_coef", 0.05), "with.ptx.rows": count(rows)}
    return to(settings, "a row for each sample there; its rows have a column text here")


def _best(option: Option, given: Given) -> Outcome:
    """Handles ``eval_DATA_pass1``, the best metric there; empty for the first one."""
    if option.is_off:
        return same("none, as it is here")
    return ask(f"metrics have other names here than {option.value}, such as eval/pass@1", "checkpoint.best")


TABLE: Table = {
    "ckpt.best_metric_key": _best,
    **dict.fromkeys(("train.enable_ema", "train.ema_beta"), _average),
    **dict.fromkeys(("ptx_coef", "pretrain_data", "pretrain_data_probs"), _pretraining),
    **placement.TABLE,
    **correction.TABLE,
    "algo.advantage.estimator": _estimator,
    "algo.advantage.gamma": _discount("gamma"),
    "algo.advantage.lambd": _discount("lam"),
    "algo.advantage.no_std_norm": _no_std,
    "actor.policy_loss_type": _loss,
    "actor.loss_agg_mode": _aggregation,
    "actor.eps_clip": _clip,
    "actor.eps_clip_low_high": _clips,
    **{f"clip_eps_{end}": _one_clip for end in ("low", "high")},
    "actor.dual_clip": lambda option, given: to({"algo.dual_clip": None if option.number is None else option.value}),
    "critic.model_name_or_path": _of_critic(key("critic.model")),
    "critic.value_clip": _of_critic(key("algo.value_clip")),
    "critic.freezing_steps": _freezing,
    "critic.adam.lr": _of_critic(key("critic.lr")),
    "critic.adam.betas": _of_critic(betas("critic")),
    "critic.lr_scheduler": _of_critic(schedule("critic")),
    "critic.min_lr_ratio": _of_critic(key("critic.min_lr_ratio")),
    "critic.lr_warmup_ratio": _warmup("critic"),
    "actor.lr_warmup_ratio": _of_both(_warmup("actor"), _warmup("critic")),
    "actor.lr_scheduler": _of_both(schedule("actor"), schedule("critic")),
    "actor.adam.betas": _of_both(betas("actor"), betas("critic")),
    "actor.adam.weight_decay": _of_both(key("actor.weight_decay"), key("critic.weight_decay")),
    "actor.max_norm": _of_both(key("actor.max_grad_norm"), key("critic.max_grad_norm")),
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
