"""OpenRLHF's corrections for the gap between vLLM and the trainer."""

from __future__ import annotations

from rlhf_translate.options import Given, Option, Outcome, Table, lost, same, to

_ENABLE = ("enable_vllm_is_correction", "algo.advantage.is_correction_enable")
_TYPE = ("vllm_is_correction_type", "algo.advantage.is_correction_type")
"""Types up to 0.10.1, and up to 0.11.1; 0.11.2 has levels and modes."""

_THRESHOLD, _LEVEL, _MODE, _GATING = (
    f"algo.advantage.is_correction_{name}" for name in ("threshold", "level", "mode", "gating")
)


def is_on(given: Given) -> bool:
    return any(given.is_on(name) for name in _ENABLE) or given[_LEVEL].value not in ("off", "none")


def _kind(given: Given) -> tuple[str, str]:
    """Returns level and mode, in the terms of 0.11.2."""
    if given.wrote(_LEVEL) or given[_LEVEL].value not in ("off", "none"):
        return given[_LEVEL].value, given[_MODE].value
    kind = "icepop" if given.is_on("use_icepop") else next((given[name].value for name in _TYPE if name in given), "tis")
    return {"icepop": ("token", "mask"), "seq-mask-tis": ("seq", "mask"), "mis": ("seq", "mask")}.get(kind, ("token", "clip"))


def _correction(option: Option, given: Given) -> Outcome:
    if not is_on(given):
        return same("no correction is on")
    loss = given["actor.policy_loss_type"].value if "actor.policy_loss_type" in given else "ppo"
    if loss == "gspo":
        return lost("with gspo there it puts the sampler into the ratio, whose rounding is as large as the limits")
    if given[_GATING].value not in ("ratio", "none"):
        return lost("only ratios are gated here, not divergences")
    limits = given[_THRESHOLD].numbers
    if not 1 <= len(limits) <= 2:
        return lost("a limit, or two")
    low, high = limits if len(limits) == 2 else (0.0, *limits)
    level, mode = _kind(given)
    if level == "seq":
        options: dict[str, object] = {"statistic": "geometric", "low": low, "high": high, "token_weight": "token_truncated"}
        remark = "weights of tokens that are kept are at most cap here"
        return to({f"with.sequence_mask.{name}": value for name, value in options.items()}, remark)
    if mode == "clip":
        return to({"with.tis.low": low, "with.tis.cap": high})
    return to({"with.icepop.low": low, "with.icepop.high": high})


TABLE: Table = {
    name: _correction
    for name in (*_ENABLE, *_TYPE, "use_icepop", "vllm_is_truncated_threshold", _LEVEL, _MODE, _GATING, _THRESHOLD)
}
