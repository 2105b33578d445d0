"""verl's algorithms, losses and KL penalties."""

from __future__ import annotations

from rlhf_translate.options import Convert, Given, Option, Outcome, Table, ask, key, lost, same, shown, to
from rlhf_translate.shared import aggregation, clip_limits, critic_first
from rlhf_translate.verl import distillation

_ACTOR = "actor_rollout_ref.actor."

_ESTIMATORS = {
    "gae": "ppo",
    "grpo": "grpo",
    "rloo": "rloo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
}


def _estimator(option: Option, given: Given) -> Outcome:
    if distillation.alone(given):
        return same("the teacher is the only signal: see distillation.enabled")
    if option.value not in _ESTIMATORS:
        return ask(f"no algorithm here does what {option.value} does there", "algo.name", algo="grpo")
    return to({"algo.name": _ESTIMATORS[option.value]})


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

_LOSSES = {"vanilla": "clip", "gpg": "pg", "gspo": "gspo", "sapo": "sapo", "cispo": "cispo", "dppo_tv": "dppo_tv"}


def _aggregation(given: Given) -> str | None:
    mode = given[f"{_ACTOR}loss_agg_mode"].value if f"{_ACTOR}loss_agg_mode" in given else "token-mean"
    if mode == "seq-mean-token-sum-norm":
        length = given.number(f"{_ACTOR}loss_scale_factor", given.number("data.max_response_length"))
        return f"sequence-mean-token-sum-over({shown(length)})"
    return _MODES.get(mode)


def _mode(option: Option, given: Given) -> Outcome:
    mode = _aggregation(given)
    if mode is None:
        return lost(f"aggregations that are known here: {', '.join(_MODES)}, seq-mean-token-sum-norm")
    return aggregation(_loss_mode(given), mode)


def _loss_mode(given: Given) -> str:
    """Handles the loss. Until 0.4.0 there is only one, and no option for it."""
    name = f"{_ACTOR}policy_loss.loss_mode"
    return given[name].value if name in given else "vanilla"


def _loss(option: Option, given: Given) -> Outcome:
    if distillation.alone(given):
        return same("distillation_loss.policy_loss_mode counts")
    return (
        to({"algo.loss": _LOSSES[option.value]})
        if option.value in _LOSSES
        else ask(f"{option.value} is not here: {', '.join(_LOSSES)} are, and other algorithms", "algo.loss")
    )


def _critic_warmup(option: Option, given: Given) -> Outcome:
    """Handles the first step in which the actor learns; verl counts steps from 1 (``critic_warmup <= global_steps``)."""
    steps = max(0, int(option.number or 0) - 1)
    return critic_first(steps, has_critic(given), f"the actor learns from step {option.value} on there")


_ENDS = tuple(f"{_ACTOR}clip_ratio_{end}" for end in ("low", "high"))


def _clips(option: Option, given: Given) -> Outcome:
    if distillation.alone(given):
        return same("the limits of the distillation count")
    low, high = (given[name] if name in given else given[f"{_ACTOR}clip_ratio"] for name in _ENDS)
    limits = clip_limits(_loss_mode(given), low.value, high.value).settings
    return to({name: value for name, value in limits.items() if name.endswith("_high") == option.name.endswith("_high")})


def _clip(option: Option, given: Given) -> Outcome:
    """Handles both limits in versions that have no limit for each side."""
    if distillation.alone(given):
        return same("the limits of the distillation count")
    if not any(name in given for name in _ENDS):
        return clip_limits(_loss_mode(given), option.value, option.value, "both limits")
    if given.wrote(*_ENDS) or not option.line:
        return same("both limits are given")
    return lost("clip_ratio_low and clip_ratio_high, 0.2 by default, override it in verl: set them")


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


TABLE: Table = {
    f"{_ACTOR}clip_ratio": _clip,
    f"{_ACTOR}clip_ratio_low": _clips,
    f"{_ACTOR}clip_ratio_high": _clips,
    f"{_ACTOR}use_kl_loss": _kl_loss,
    f"{_ACTOR}kl_loss_coef": _kl_loss,
    f"{_ACTOR}kl_loss_type": _kl_loss,
    f"{_ACTOR}loss_agg_mode": _mode,
    f"{_ACTOR}policy_loss.loss_mode": _loss,
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
    f"{_ACTOR}clip_ratio_c": lambda option, given: to({"algo.dual_clip": None if option.is_off else option.value}),
    "critic.cliprange_value": of_critic(key("algo.value_clip")),
    "trainer.critic_warmup": _critic_warmup,
    **distillation.table(_aggregation, _KINDS),
}
