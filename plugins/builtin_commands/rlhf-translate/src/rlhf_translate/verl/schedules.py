"""verl's schedules of the learning rate, under the names of each of its backends."""

from __future__ import annotations

from rlhf_translate.options import Convert, Given, Option, Outcome, Table, lost, same, shown, to

_SHAPES = ("lr_decay_style", "decay_type", "lr_scheduler_type", "warmup_style", "lr_scheduler")
"""Names of the schedule: Megatron's, torchtitan's, and those of the others, the newest first."""
_FIRST = ("init_lr_ratio", "lr_start", "lr_warmup_init")
"""Names of the rate, or the share of it, with which a warm-up begins."""
_LOWEST = ("min_lr_ratio", "min_lr_factor", "min_lr", "lr_min")
"""Names of the lowest share of the rate, and of the lowest rate."""
MATTER = ("lr_scheduler_type", "lr_decay_style", "decay_type", *_LOWEST, "lr_start", "lr_warmup_init")
"""Options whose defaults matter."""


def rows(role: str, place: str) -> Table:
    """Returns the options of a role's schedule.

    Args:
        place: beginning of their names.
    """

    def shape_of(given: Given) -> str:
        names = [f"{place}.{name}" for name in _SHAPES if f"{place}.{name}" in given]
        written = [name for name in names if given.wrote(name)]
        return given[(written or names)[0]].value.lower() if names else "constant"

    def shape(option: Option, given: Given) -> Outcome:
        if option.is_off and option.value.lower() in ("none", "null"):
            return same("another name of it counts")
        if option.value in ("constant", "linear", "cosine"):
            return to({f"{role}.schedule": option.value})
        return lost("schedules here: constant, linear, cosine")

    def lowest(option: Option, given: Given) -> Outcome:
        if option.is_off or not option.number:
            return same("down to 0, as it is here")
        if shape_of(given) == "constant":
            return same("the schedule is constant, so it is never reached")
        share = option.number
        if option.name.endswith(("min_lr", "lr_min")):
            share /= given.many(f"{place}.lr")
            return to({f"{role}.min_lr_ratio": shown(share)}, f"{option.value} of a rate of {given[f'{place}.lr'].value}")
        return to({f"{role}.min_lr_ratio": option.value})

    def first(option: Option, given: Given) -> Outcome:
        steps, share = (given.number(f"{place}.{name}") for name in ("lr_warmup_steps", "lr_warmup_steps_ratio"))
        if option.is_off or not option.number or (steps <= 0 and not share):
            return same("warm-ups begin at 0" if option.is_off or not option.number else "there is no warm-up")
        return lost("a warm-up begins at 0 here")

    def span(option: Option, given: Given) -> Outcome:
        whole = option.is_off or (option.name.endswith("ratio") and option.number == 1)
        total = given["trainer.total_training_steps"]
        if whole or (option.name.endswith("steps") and total.line and option.value == total.value):
            return same("to the end of the run, as it is here")
        return lost("the schedule ends with the run here")

    def cycles(option: Option, given: Given) -> Outcome:
        half = option.number == 0.5 or shape_of(given) != "cosine"
        return same("half a cosine, as it is here") if half else lost("the schedule cosine is half a cosine here")

    def indexed(option: Option, given: Given) -> Outcome:
        first_rate = "the first update of a warm-up has the rate 0 there, and 1 / warmup_steps of it here"
        return same("as it is here" if option.is_off else first_rate)

    def grows(option: Option, given: Given) -> Outcome:
        constant = option.is_off or option.value == "constant"
        return same("constant, as it is here") if constant else lost("the weight decay is constant here")

    def wsd(option: Option, given: Given) -> Outcome:
        used = shape_of(given).upper() == "WSD" and not option.is_off
        return lost("schedules here: constant, linear, cosine") if used else same("the schedule is not WSD")

    kinds: dict[tuple[str, ...], Convert] = {
        _SHAPES: shape,
        _LOWEST: lowest,
        _FIRST: first,
        ("lr_decay_steps", "lr_decay_ratio"): span,
        ("num_cycles",): cycles,
        ("zero_indexed_step",): indexed,
        ("weight_decay_incr_style", "wd_incr_style"): grows,
        ("lr_wsd_decay_style", "lr_wsd_decay_steps"): wsd,
    }
    return {f"{place}.{name}": convert for names, convert in kinds.items() for name in names}
