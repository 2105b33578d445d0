"""verl's policy losses, and what its limits of the ratio mean in each of them."""

from __future__ import annotations

from rlhf_translate.options import Given, Option, Outcome, Table, ask, key, lost, same, shown, to
from rlhf_translate.shared import clip_limits
from rlhf_translate.verl import distillation

_ACTOR = "actor_rollout_ref.actor."
_PLACE = f"{_ACTOR}policy_loss."
_GROUPS = ("grpo", "grpo_vectorized")
_GMPO = "geo_mean"

_LOSSES = {"vanilla": "clip", "gpg": "pg", "gspo": "gspo", "sapo": "sapo", "cispo": "cispo", "dppo_tv": "dppo_tv"}
_EXTENSIONS = {"clip_cov": "clip", "kl_cov": "ratio"}
"""Losses that are another one with an extension of this name → that loss."""
_CLIPPED = ("vanilla", "clip_cov", "gspo", _GMPO)
"""Losses with an upper and a lower limit."""
_SHARES = {
    "clip_cov_ratio": "with.clip_cov.share",
    "clip_cov_lb": "with.clip_cov.low",
    "clip_cov_ub": "with.clip_cov.high",
    "kl_cov_ratio": "with.kl_cov.share",
    "ppo_kl_coef": "with.kl_cov.coef",
}
MATTER = tuple(f"{_PLACE}{name}" for name in _SHARES)
"""Options whose defaults matter."""


def mode_of(given: Given) -> str:
    """Returns the name of the loss. Until 0.4.0 there is only one, and no option for it."""
    name = f"{_PLACE}loss_mode"
    return given[name].value if name in given else "vanilla"


def is_gmpo(given: Given) -> bool:
    """Returns True for GMPO, which is an algorithm here: GRPO's advantages, and a loss of its own."""
    return mode_of(given) == _GMPO and given["algorithm.adv_estimator"].value in _GROUPS


def _loss(option: Option, given: Given) -> Outcome:
    if distillation.alone(given):
        return same("distillation_loss.policy_loss_mode counts")
    mode = option.value
    if is_gmpo(given):
        return same("GMPO is an algorithm here: see algorithm.adv_estimator")
    if mode in _EXTENSIONS:
        return to({"algo.loss": _EXTENSIONS[mode], f"with.{mode}.name": mode})
    if mode not in _LOSSES:
        return ask(f"{mode} is not here: {', '.join((*_LOSSES, *_EXTENSIONS))} are, and other algorithms", "algo.loss")
    low = _end(given, "low")
    raised = mode == "cispo" and (low.number or 0) < 1
    return to(
        {"algo.loss": _LOSSES[mode]}, f"ratios below 1 - {low.value} count as that there, here as they are" if raised else ""
    )


_ENDS = ("low", "high")


def _end(given: Given, name: str) -> Option:
    end = f"{_ACTOR}clip_ratio_{name}"
    return given[end] if end in given else given[f"{_ACTOR}clip_ratio"]


def _limits(option: Option, given: Given) -> Outcome:
    if distillation.alone(given):
        return same("the limits of the distillation count")
    mode, low, high = mode_of(given), *(_end(given, name) for name in _ENDS)
    upper = option.name.endswith("_high")
    if mode == "cispo":
        if upper:
            return to({"algo.cispo_max": shown(1 + (high.number or 0))}, f"1 + {high.value}")
        return same("the ratio has no lower limit" if (low.number or 0) >= 1 else "see policy_loss.loss_mode")
    if mode == "dppo_tv":
        if low.number != high.number:
            return lost("one limit for both signs of the advantage here: --algo.dppo-delta")
        return to({"algo.dppo_delta": high.value}, "how far a probability may move")
    if (mode in _LOSSES and mode not in _CLIPPED) or mode == "kl_cov":
        return same(f"{mode} has no such limit")
    names = clip_limits(mode, low.value, high.value).settings
    return to({name: value for name, value in names.items() if name.endswith("_high") == upper})


def _both(option: Option, given: Given) -> Outcome:
    """Handles both limits in versions that have no limit for each side."""
    if distillation.alone(given):
        return same("the limits of the distillation count")
    ends = [f"{_ACTOR}clip_ratio_{name}" for name in _ENDS]
    if not any(name in given for name in ends):
        return clip_limits(mode_of(given), option.value, option.value, "both limits")
    if given.wrote(*ends) or not option.line:
        return same("both limits are given")
    return lost("clip_ratio_low and clip_ratio_high, 0.2 by default, override it in verl: set them")


def _largest(option: Option, given: Given) -> Outcome:
    """Handles the limit of the clipped loss, which the loss ``dppo_tv`` takes as that of its weights."""
    mode = mode_of(given)
    if mode == "dppo_tv" and not option.is_off:
        return to({"algo.dppo_max": option.value}, "the largest weight")
    if mode == "clip_cov":
        return to({"algo.dual_clip": None}, "clip_cov does not use it there")
    if mode != "vanilla" and (mode in _LOSSES or mode in _EXTENSIONS or is_gmpo(given)):
        return same(f"{mode} does not use it")
    return to({"algo.dual_clip": None if option.is_off else option.value})


def _share(option: Option, given: Given) -> Outcome:
    name = option.name.rpartition(".")[2]
    setting = _SHARES[name]
    mode = setting.split(".")[1]
    return to({setting: option.value}) if mode_of(given) == mode else same(f"only the loss {mode} uses it")


def _entropy(option: Option, given: Given) -> Outcome:
    if is_gmpo(given):
        return same("off, as it is here") if not option.number else lost("--algo gmpo has no entropy bonus")
    return key("algo.entropy_coef")(option, given)


TABLE: Table = {
    f"{_PLACE}loss_mode": _loss,
    **{f"{_PLACE}{name}": _share for name in _SHARES},
    f"{_ACTOR}clip_ratio": _both,
    **{f"{_ACTOR}clip_ratio_{name}": _limits for name in _ENDS},
    f"{_ACTOR}clip_ratio_c": _largest,
    f"{_ACTOR}entropy_coeff": _entropy,
}
