"""TRL's batches: prompts, completions, updates and steps, of all processes together."""

from __future__ import annotations

from rlhf_translate.options import PROCESSES, Convert, Given, Option, Outcome, ask, count, lost, rounded, same, shown, to
from rlhf_translate.shared import rows_of, run_steps, scheduled_warmup

SAMPLED = ("grpo", "rloo")
_COUNTS_COMPLETIONS = (0, 15)
"""The first version whose batches are completions."""


def processes(given: Given) -> int:
    return count(given.many(PROCESSES))


def _micro_batches(given: Given) -> float:
    """Returns the micro-batches per update."""
    return given.many("gradient_accumulation_steps")


def _at_once(given: Given) -> float:
    """Returns the rows of all processes in one forward pass; before 0.15 those of GRPO are prompts."""
    prompts = given.method == "grpo" and given.version < _COUNTS_COMPLETIONS
    rows = given.many("per_device_train_batch_size") * processes(given)
    return rows * given.many("num_generations") if prompts else rows


def _per_generation(given: Given) -> float:
    """Returns the number of completions that are sampled at once."""
    if "generation_batch_size" in given:
        return given.many("generation_batch_size")
    return _at_once(given) * given.many("steps_per_generation", _micro_batches(given))


def _minibatches(given: Given) -> int:
    return count(_per_generation(given) / (_at_once(given) * _micro_batches(given)))


def updates(given: Given) -> int:
    """Returns the optimizer updates in one of our steps."""
    return _minibatches(given) * count(given.many("num_iterations")) if given.method in SAMPLED else 1


def batch(option: Option, given: Given) -> Outcome:
    together = "all processes together" if processes(given) > 1 else "one process"
    if given.method not in SAMPLED:
        rows = _at_once(given) * _micro_batches(given)
        if given.method == "sft" and given.is_on("packing"):
            packed = f"{shown(rows)} packed rows per optimizer update there, each of several rows of the data"
            return ask(f"{packed}; here rows of the data: that many times how many fit into max_length", "train.batch_size")
        return to({"train.batch_size": count(rows)}, f"rows or pairs per optimizer update, {together}")
    prompts = _per_generation(given) / given.many("num_generations")
    settings = {"train.batch_size": count(prompts), "train.minibatches": _minibatches(given)}
    return to(
        settings,
        f"{_per_generation(given):g} completions / {given['num_generations'].value} per prompt, {together}{rounded(prompts)}",
    )


def generations(option: Option, given: Given) -> Outcome:
    return to({"rollout.n": option.value})


def max_steps(option: Option, given: Given) -> Outcome:
    if (option.number or 0) <= 0:
        return same("the number of passes counts")
    steps = (option.number or 0) / updates(given)
    remark = f"{option.value} updates, {updates(given)} per batch{rounded(steps)}" if updates(given) > 1 else ""
    return to({"train.steps": count(steps)}, remark)


def passes(option: Option, given: Given) -> Outcome:
    if given.number("max_steps") > 0:
        return same("max_steps overrides it")
    if given.method not in SAMPLED:
        return to({"data.epochs": option.written})
    size = batch(option, given).settings["train.batch_size"]
    return run_steps(option, size, rows_of(given["dataset_name"].texts))


def every(name: str, strategy: str, usual: str) -> Convert:
    def convert(option: Option, given: Given) -> Outcome:
        chosen = given[strategy].value if strategy in given else usual
        if chosen == "no":
            return same("never") if name == "eval.every" else to({name: 0}, "never")
        if chosen == "epoch":
            return (
                ask("once per pass over the data, in steps", name)
                if option.name.endswith("strategy")
                else same("once per pass")
            )
        if chosen not in ("steps",):
            return lost(f"strategies here: no, steps; not {chosen}")
        steps = given["eval_steps" if name == "eval.every" else "save_steps"].number
        if steps is None:
            return same("at the start and the end")
        if 0 < steps < 1:
            return ask(f"{shown(steps)} of the run, in steps", name)
        return to({name: count(steps / updates(given))})

    return convert


def _all_updates(given: Given) -> int | None:
    """Returns the updates of the whole run, if known."""
    if (most := given.number("max_steps")) > 0:
        return int(most)
    rows = rows_of(given["dataset_name"].texts)
    if rows is None:
        return None
    if given.method in SAMPLED:
        size = batch(given["num_train_epochs"], given).settings["train.batch_size"]
        steps = run_steps(given["num_train_epochs"], size, rows).settings.get("train.steps")
        return steps and int(steps) * updates(given)
    size = batch(given["num_train_epochs"], given).settings["train.batch_size"]
    return int(rows * given.number("num_train_epochs", 1) // size)


def warmup(option: Option, given: Given) -> Outcome:
    """Converts the warm-up: a value from 1 on is steps, below it is a share of the run; the older ``warmup_ratio`` is a share."""
    number, constant = option.number or 0.0, given["lr_scheduler_type"].value == "constant"
    if number >= 1 and not constant:
        return to({"actor.warmup_steps": int(number)})
    if option.name.endswith("warmup_ratio") and given.number("warmup_steps") >= 1:
        return same("warmup_steps overrides it")
    return scheduled_warmup(
        "actor", given["lr_scheduler_type"], number, _all_updates(given) if number else None, updates(given)
    )
