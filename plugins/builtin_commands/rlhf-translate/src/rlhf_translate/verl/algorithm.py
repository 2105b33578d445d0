"""verl's algorithms, losses and KL penalties."""

from __future__ import annotations

import re

from rlhf_translate.options import Convert, Given, Option, Outcome, Table, ask, key, lost, same, shown, to
from rlhf_translate.shared import aggregation, critic_first
from rlhf_translate.verl import distillation, losses

_ACTOR = "actor_rollout_ref.actor."

_ESTIMATORS = {
    "gae": "ppo",
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "gdpo": "gdpo",
    "opo": "opo",
    "optimal_token_baseline": "otb",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
}


def _estimator(option: Option, given: Given) -> Outcome:
    if distillation.alone(given):
        return same("the teacher is the only signal: see distillation.enabled")
    if option.value not in _ESTIMATORS:
        return ask(f"no algorithm here does what {option.value} does there", "algo.name", algo="grpo")
    return to({"algo.name": "gmpo" if losses.is_gmpo(given) else _ESTIMATORS[option.value]})


def reward_parts(given: Given) -> list[str]:
    """Returns the keys of the reward function's result that GDPO normalises each by itself."""
    name = "algorithm.gdpo_reward_keys"
    return given[name].items if name in given and given["algorithm.adv_estimator"].value == "gdpo" else []


def _alias(name: str) -> str:
    return re.sub(r"\W", "_", name)


def _parts(option: Option, given: Given) -> Outcome:
    names = [f"reward.{_alias(name)}" for name in reward_parts(given)]
    if not names:
        return same("only gdpo uses it")
    why = "each part is a reward of its own here: one function for each"
    return ask(why, *(f"{name}.name" for name in names), **dict.fromkeys(names, "math_verifier"))


def _weights_of_parts(option: Option, given: Given) -> Outcome:
    names, weights = reward_parts(given), option.numbers
    if len(names) != len(weights):
        return same("only gdpo uses it") if not names else lost(f"{len(weights)} weights for {len(names)} rewards")
    return to({f"reward.{_alias(name)}.weight": weight for name, weight in zip(names, weights, strict=True)})


def has_critic(given: Given) -> bool:
    return given["algorithm.adv_estimator"].value == "gae" and not distillation.alone(given)


def of_critic(convert: Convert) -> Convert:
    return lambda option, given: convert(option, given) if has_critic(given) else same("no critic is trained")


def _discount(name: str) -> Convert:
    def convert(option: Option, given: Given) -> Outcome:
        if has_critic(given) or (name == "gamma" and given["algorithm.adv_estimator"].value == "reinforce_plus_plus"):
            return to({f"algo.{name}": option.value})
        algorithm = given["algorithm.adv_estimator"].value
        unused = algorithm in _ESTIMATORS and (name == "lam" or algorithm != "reinforce_plus_plus")
        if unused or option.number == 1:
            return same(f"{algorithm} does not use it there either" if unused else "1: no discount")
        return lost("the algorithm discounts nothing here")

    return convert


_KINDS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3", "k3+": "k2", "low_var_kl+": "k2"}
"""Estimators of the KL. The gradient of ``k3+`` is that of ``k2``."""
_ZERO = "the coefficient is 0: no reference model is loaded"
_BOTH_PLACES = (0, 4)
"""The first version that can have the penalty in the reward beside one in the loss."""


def _kl(option: Option, given: Given) -> Outcome:
    """Handles the penalty in both places; a run here has only one."""
    if given.is_on(f"{_ACTOR}use_kl_loss"):
        return _kl_loss(option, given)
    if not given.is_on("algorithm.use_kl_in_reward"):
        own = option.name == "algorithm.use_kl_in_reward"
        return same("off, as it is here" if own else "not used, because algorithm.use_kl_in_reward is off")
    coefficient = given["algorithm.kl_ctrl.kl_coef"]
    if not coefficient.number and given["algorithm.kl_ctrl.type"].value != "adaptive":
        return same(_ZERO)
    settings: dict[str, object] = {"kl.coef": coefficient.value, "kl.place": "reward"}
    penalty = given["algorithm.kl_penalty"].value if "algorithm.kl_penalty" in given else "kl"
    if penalty not in _KINDS:
        return lost(f"estimators that are known here: {', '.join(_KINDS)}")
    kind = _KINDS[penalty]
    settings |= {"kl.estimator": kind, "kl.force": True} if kind != "k1" else {}
    if given["algorithm.kl_ctrl.type"].value == "adaptive":
        settings |= {"kl.controller": "adaptive", "kl.target": given.number("algorithm.kl_ctrl.target_kl", 0.1)}
        settings |= {"kl.horizon": int(given.number("algorithm.kl_ctrl.horizon", 10000))}
    return to(settings)


def _kl_loss(option: Option, given: Given) -> Outcome:
    if not given.is_on(f"{_ACTOR}use_kl_loss"):
        own = option.name.endswith("use_kl_loss")
        return same("off, as it is here" if own else "not used, because use_kl_loss is off")
    if not given[f"{_ACTOR}kl_loss_coef"].number:
        return same(_ZERO)
    kind = given[f"{_ACTOR}kl_loss_type"].value if f"{_ACTOR}kl_loss_type" in given else "low_var_kl"
    if kind not in _KINDS:
        return lost(f"estimators that are known here: {', '.join(_KINDS)}")
    settings = {"kl.coef": given[f"{_ACTOR}kl_loss_coef"].value, "kl.place": "loss", "kl.estimator": _KINDS[kind]}
    mode = _aggregation(given)
    return to(settings | ({"kl.aggregation": mode} if mode not in (None, "token-mean") else {}))


def _kl_in_reward(option: Option, given: Given) -> Outcome:
    both = given.is_on(f"{_ACTOR}use_kl_loss") and given.is_on("algorithm.use_kl_in_reward")
    if both and given.version >= _BOTH_PLACES:
        return lost("a run has one KL penalty here, and the one in the loss is taken")
    if given.is_on(f"{_ACTOR}use_kl_loss"):
        return same("the KL penalty is in the loss")
    return _kl(option, given)


_MODES = {
    "token-mean": "token-mean",
    "seq-mean-token-mean": "sequence-mean-token-mean",
    "seq-mean-token-sum": "sequence-mean-token-sum",
}


def _aggregation(given: Given) -> str | None:
    mode = given[f"{_ACTOR}loss_agg_mode"].value if f"{_ACTOR}loss_agg_mode" in given else "token-mean"
    if mode == "seq-mean-token-sum-norm":
        length = given.number(f"{_ACTOR}loss_scale_factor", given.number("data.max_response_length"))
        return f"sequence-mean-token-sum-over({shown(length)})"
    return _MODES.get(mode)


def _mode(option: Option, given: Given) -> Outcome:
    if losses.is_gmpo(given):
        return same("GMPO is a mean over episodes, there too")
    mode = _aggregation(given)
    if mode is None:
        return lost(f"aggregations that are known here: {', '.join(_MODES)}, seq-mean-token-sum-norm")
    return aggregation(losses.mode_of(given), mode)


def _critic_warmup(option: Option, given: Given) -> Outcome:
    """Handles the first step in which the actor learns; verl counts steps from 1 (``critic_warmup <= global_steps``)."""
    steps = max(0, int(option.number or 0) - 1)
    return critic_first(steps, has_critic(given), f"the actor learns from step {option.value} on there")


def _filter(option: Option, given: Given) -> Outcome:
    if option.is_off:
        return same("off, as it is here")
    metric = given["algorithm.filter_groups.metric"]
    settings = {"with.dynamic_filtering.name": "dynamic_filtering"}
    if metric.value in ("acc", "none", "score", "seq_reward", "seq_final_reward"):
        return to(settings)
    return to(settings, f"by scores, or by rewards, not by {metric.value}")


def _refills(option: Option, given: Given) -> Outcome:
    if not given.is_on("algorithm.filter_groups.enable"):
        return same("no groups are dropped")
    if (option.number or 0) < 1:
        return lost("there as many as it takes; here --rollout.max-refills is a limit")
    return to({"rollout.max_refills": int(option.number or 1) - 1})


def _of_filter(option: Option, given: Given) -> Outcome:
    return _filter(given["algorithm.filter_groups.enable"], given)


def _has_critic(option: Option, given: Given) -> Outcome:
    algorithm = given["algorithm.adv_estimator"].value
    if "critic.enable" not in given or option.is_off != has_critic(given):
        return same(f"as {algorithm} has it here")
    return lost(f"{algorithm} trains {'a' if option.is_off else 'no'} critic here")


TABLE: Table = {
    **losses.TABLE,
    "critic.enable": _has_critic,
    "algorithm.gdpo_reward_keys": _parts,
    "algorithm.gdpo_reward_weights": _weights_of_parts,
    f"{_ACTOR}use_kl_loss": _kl_loss,
    f"{_ACTOR}kl_loss_coef": _kl_loss,
    f"{_ACTOR}kl_loss_type": _kl_loss,
    f"{_ACTOR}loss_agg_mode": _mode,
    f"{_ACTOR}loss_scale_factor": lambda option, given: (
        same("the length of answers") if option.is_off else _mode(given[f"{_ACTOR}loss_agg_mode"], given)
    ),
    "algorithm.adv_estimator": _estimator,
    "algorithm.gamma": _discount("gamma"),
    "algorithm.lam": _discount("lam"),
    "algorithm.norm_adv_by_std_in_grpo": lambda option, given: (
        to({"algo.std": "none"}) if option.is_off else same("on, as it is here")
    ),
    "algorithm.use_kl_in_reward": _kl_in_reward,
    "algorithm.kl_penalty": _kl_in_reward,
    **{f"algorithm.kl_ctrl.{name}": _kl_in_reward for name in ("kl_coef", "type", "target_kl", "horizon")},
    "algorithm.filter_groups.enable": _filter,
    "algorithm.filter_groups.metric": _of_filter,
    "algorithm.filter_groups.max_num_gen_batches": _refills,
    "critic.cliprange_value": of_critic(key("algo.value_clip")),
    "trainer.critic_warmup": _critic_warmup,
    **distillation.table(_aggregation, _KINDS),
}
