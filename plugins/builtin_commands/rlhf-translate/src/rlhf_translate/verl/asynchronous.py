"""verl's programs and modes that sample while they train, with engines on devices of their own."""

from __future__ import annotations

from rlhf_translate.options import PROGRAM, Convert, Given, Option, Outcome, Table, ask, count, lost, same, to

_ROLLOUT = "actor_rollout_ref.rollout."
_STREAM = "async_training."
_MODE = "trainer.v1.trainer_mode"
_AHEAD = ("fully_async", "separate_async")
"""Modes of the newer trainer whose engines have devices of their own, and work at the same time as it does."""
AHEAD = "sampling ahead of training: --async-depth"


def is_stream(given: Given) -> bool:
    """Returns True for the program whose trainer takes its batches from a queue; it reads no ``data.train_batch_size``."""
    return "fully_async_main" in given[PROGRAM].name


def _is_separate(given: Given) -> bool:
    mode = given[_MODE].value if _MODE in given else "sync"
    hybrid = given["actor_rollout_ref.hybrid_engine"]
    return mode in _AHEAD or is_stream(given) or (bool(hybrid.line) and hybrid.is_off)


def engines_place(given: Given) -> str:
    """Returns the beginning of the options that give engines devices of their own; empty: they have the trainer's."""
    places = (place for place in ("rollout.", _ROLLOUT) if given.wrote(f"{place}n_gpus_per_node", f"{place}nnodes"))
    return next(places, "") if _is_separate(given) else ""


_REFILLS = (0, 9)
"""The first version whose trainer fills up its batches: before, it trains on all prompts that it draws at a time."""


def batch_option(given: Given) -> str:
    """Returns the option that says how many prompts a batch has."""
    drawn = "data.gen_batch_size"
    whole = given.version < _REFILLS and "main_dapo" not in given[PROGRAM].name
    return drawn if drawn in given and whole else "data.train_batch_size"


def prompts(given: Given) -> float:
    """Returns the prompts of one batch of the trainer."""
    if is_stream(given):
        return given.many("actor_rollout_ref.actor.ppo_mini_batch_size") * given.many(f"{_STREAM}require_batches")
    return given.many(batch_option(given))


def _batch(option: Option, given: Given) -> Outcome:
    if is_stream(given):
        return same("the trainer takes ppo_mini_batch_size × require_batches prompts at a time")
    if batch_option(given) != "data.train_batch_size":
        return same("data.gen_batch_size counts: this trainer trains on all prompts that it draws at a time")
    return to({"train.batch_size": option.written})


def _samples(option: Option, given: Given) -> Outcome:
    if option.is_off or not is_stream(given):
        return same("passes count" if option.is_off else "only the asynchronous program uses it")
    most = f"{option.value} prompts in batches of {prompts(given):g}, or fewer: as many as the passes have"
    return to({"train.steps": count((option.number or 0) // prompts(given))}, most)


def _drawn(option: Option, given: Given) -> Outcome:
    """Handles how many prompts are drawn at a time."""
    if is_stream(given) or batch_option(given) != "data.gen_batch_size":
        return same("as many tasks are drawn as a batch needs")
    return to({"train.batch_size": option.value}, "this trainer trains on all prompts that it draws at a time")


def _mode(option: Option, given: Given) -> Outcome:
    if option.value == "sync" or option.is_off:
        return same("off, as it is here")
    return ask("trainer and engines work at the same time there, so many batches apart", "async_depth")


def _syncs(option: Option, given: Given) -> Outcome:
    return same("after each step, as here") if option.number == 1 else lost("engines get weights after every step here")


def every(name: str) -> Convert:
    """Handles evaluations, which the asynchronous program counts by the weights that it sends."""

    def convert(option: Option, given: Given) -> Outcome:
        if name == "eval.every" and "data.val_files" not in given:
            return same("nothing is evaluated")
        number = max(0, int(option.number or 0))
        if name == "eval.every" and is_stream(given) and number:
            each = int(given.number(f"{_STREAM}trigger_parameter_sync_step", 4))
            return to({name: number * each}, f"every {number} weight syncs, each after {each} steps")
        return to({name: number})

    return convert


TABLE: Table = {
    "data.train_batch_size": _batch,
    "data.gen_batch_size": _drawn,
    "rollout.total_rollout_steps": _samples,
    "rollout.test_freq": every("eval.every"),
    f"{_STREAM}require_batches": lambda option, given: same("the batch has them all"),
    f"{_STREAM}trigger_parameter_sync_step": _syncs,
    **{f"trainer.v1.{mode}.parameter_sync_step": _syncs for mode in _AHEAD},
    _MODE: _mode,
}
