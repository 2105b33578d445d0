"""verl's corrections for the gap between the engine and the trainer: weights and rejection."""

from __future__ import annotations

from rlhf_translate.options import Given, Option, Outcome, Table, ask, lost, same, to

_PLACE = "algorithm.rollout_correction."
_ACTOR = "actor_rollout_ref.actor."
_OWN = {"seq_sum_k1": "sum", "seq_mean_k1": "geometric", "seq_mean_k3": "k3"}
"""Rejections by a statistic of the sequence → their name here. Limits of ``k1`` are on the inverse ratio."""
_LEVELS = {"sequence": "sum", "geometric": "geometric"}
"""The same until 0.7.0, with limits on the ratio."""


def _is_reinforce(given: Given) -> bool:
    return given[f"{_PLACE}loss_type"].value == "reinforce" or given.is_on(f"{_PLACE}use_policy_gradient")


def _limits(text: str) -> tuple[float | None, float]:
    """Parses ``0.5_2`` or ``2``."""
    low, _, high = text.rpartition("_")
    return (float(low) if low else None), float(high)


def _weights(option: Option, given: Given) -> Outcome:
    kind = given[f"{_PLACE}rollout_is"].value.lower()
    if kind not in ("token", "sequence"):
        return same("no correction is on") if kind in ("none", "null") else lost("levels here: token, sequence")
    if given.is_on(f"{_PLACE}bypass_mode"):
        if _is_reinforce(given):
            return lost("weights for the sampler's own log-probabilities: here only the ratio corrects then")
        return same("with bypass_mode and the clipped loss the ratio corrects, there too")
    if given.is_on(f"{_PLACE}rollout_is_batch_normalize"):
        return lost("weights are not normalised over the batch here")
    low, high = _limits(given[f"{_PLACE}rollout_is_threshold"].value)
    if kind == "token":
        return to({"with.icepop.low": low, "with.icepop.high": high}) if low is not None else to({"with.tis.cap": high})
    if low is not None:
        return to({"with.sequence_mask.low": low, "with.sequence_mask.high": high})
    return to({"with.sequence_truncate.cap": high})


def _rejection(option: Option, given: Given) -> Outcome:
    kinds = given[f"{_PLACE}rollout_rs"]
    if kinds.is_off:
        return same("nothing is rejected")
    names = kinds.items
    unknown = [name for name in names if name not in {**_OWN, **_LEVELS}]
    if unknown:
        return lost(f"rejections here: {', '.join(_OWN)}; not {', '.join(unknown)}")
    if given.is_on(f"{_PLACE}bypass_mode"):
        return lost("nothing is rejected here where the ratio compares with the sampler's log-probabilities")
    if f"{_PLACE}rollout_rs_threshold" not in given:
        keys = [f"with.{_alias(name, names)}.{end}" for name in names for end in ("low", "high")]
        return ask("verl needs rollout_rs_threshold with it", *keys)
    limits = given[f"{_PLACE}rollout_rs_threshold"].items
    if len(limits) not in (1, len(names)):
        return lost(f"{len(limits)} limits for {len(names)} rejections")
    settings: dict[str, object] = {}
    for number, name in enumerate(names):
        settings |= _mask(name, names, limits[number % len(limits)], given)
    return to(settings, "zeros stay in the denominator here")


def _alias(name: str, names: list[str]) -> str:
    return "sequence_mask" if len(names) == 1 else name


def _mask(name: str, names: list[str], text: str, given: Given) -> dict[str, object]:
    alias = _alias(name, names)
    low, high = _limits(text)
    if name in _LEVELS:
        low = given[f"{_PLACE}rollout_rs_threshold_lower"].number
        ends = {"low": low if low is not None else 1 / high, "high": high}
    elif name.endswith("k1"):
        ends = {"low": 1 / high, "high": 1 / low if low is not None else high}
    else:
        ends = {"high": high}
    own = {"name": "sequence_mask"} if alias != "sequence_mask" else {}
    values: dict[str, object] = {**own, "statistic": {**_OWN, **_LEVELS}[name], "token_weight": "one", **ends}
    return {f"with.{alias}.{key}": value for key, value in values.items()}


def _bypass(option: Option, given: Given) -> Outcome:
    if option.is_off:
        return same("off, as it is here")
    if given[f"{_ACTOR}policy_loss.loss_mode"].value == "gspo":
        return lost("gspo needs recomputed probabilities here: the sampler's rounding is as large as its limits")
    return to({"train.old_logprobs": "sampler"})


def _reinforce(option: Option, given: Given) -> Outcome:
    if not given.is_on(f"{_PLACE}bypass_mode"):
        return same("only bypass_mode uses it")
    return (
        lost("a loss without clipping: --algo.loss pg, which takes one update per batch")
        if _is_reinforce(given)
        else same("the clipped loss, as it is here")
    )


def _of_06(option: Option, given: Given) -> Outcome:
    """Handles 0.6.0: a threshold, a level and a mode."""
    if "algorithm.rollout_is_threshold" not in given or not given.is_on("algorithm.rollout_is"):
        return same("no correction is on")
    names = {"level": "token", "mode": "truncate"}
    level, mode = (given[name].value if (name := f"algorithm.rollout_is_{key}") in given else names[key] for key in names)
    high = given.number("algorithm.rollout_is_threshold")
    low = given["algorithm.rollout_is_threshold_lower"].number
    low = low if low is not None else 1 / high
    known: dict[tuple[str, str], dict[str, object]] = {
        ("token", "truncate"): {"with.tis.cap": high},
        ("token", "mask"): {"with.icepop.low": low, "with.icepop.high": high},
        ("sequence", "truncate"): {"with.sequence_truncate.cap": high},
        ("sequence", "mask"): {"with.sequence_mask.low": low, "with.sequence_mask.high": high},
    }
    return to(known[level, mode]) if (level, mode) in known else lost(f"{level} and {mode} have no counterpart together")


def _veto(option: Option, given: Given) -> Outcome:
    return same("off, as it is here") if option.is_off else lost("no token vetoes its sequence here")


TABLE: Table = {
    f"{_PLACE}rollout_is": _weights,
    f"{_PLACE}rollout_is_threshold": _weights,
    f"{_PLACE}rollout_is_batch_normalize": lambda option, given: (
        same("off, as it is here") if option.is_off else _weights(given[f"{_PLACE}rollout_is"], given)
    ),
    f"{_PLACE}rollout_token_veto_threshold": _veto,
    "algorithm.rollout_is_veto_threshold": _veto,
    f"{_PLACE}rollout_rs": _rejection,
    f"{_PLACE}rollout_rs_threshold": _rejection,
    f"{_PLACE}rollout_rs_threshold_lower": _rejection,
    f"{_PLACE}bypass_mode": _bypass,
    f"{_PLACE}loss_type": _reinforce,
    f"{_PLACE}use_policy_gradient": _reinforce,
    **{f"algorithm.rollout_is{name}": _of_06 for name in ("", "_threshold", "_threshold_lower", "_level", "_mode")},
    "actor_rollout_ref.actor.tis_imp_ratio_cap": lambda option, given: (
        to({"with.tis.cap": option.value}) if (option.number or 0) > 0 else same("no correction is on")
    ),
}
