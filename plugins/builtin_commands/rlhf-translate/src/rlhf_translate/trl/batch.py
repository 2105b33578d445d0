"""TRL's batches: prompts, completions, updates and steps, of all processes together."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_translate.options import (
    PROCESSES,
    Convert,
    Given,
    Option,
    Outcome,
    ask,
    count,
    lost,
    rounded,
    same,
    shown,
    to,
)
from rlhf_translate.shared import rows_of, run_steps, scheduled_warmup
from rlhf_translate.trl.parallelism import data_ranks, of_one_row

SAMPLED = ("grpo", "rloo")
_COUNTS_COMPLETIONS = (0, 15)
"""The first version whose batches are completions."""


def processes(given: Given) -> int:
    return count(given.many(PROCESSES))


def _at_once(given: Given) -> float:
    """Returns the rows of all processes in one forward pass, each once; before 0.15 those of GRPO are prompts."""
    prompts = given.method == "grpo" and given.version < _COUNTS_COMPLETIONS
    rows = given.many("per_device_train_batch_size") * data_ranks(given)
    return rows * given.many("num_generations") if prompts else rows


@dataclass(frozen=True, slots=True)
class _Step:
    """One of our steps: completions that are sampled together, and the updates on them."""

    completions: float
    minibatches: int
    epochs: int
    remark: str = ""
    mixed: str = ""
    """Why there is no such step, and this is only near it: updates and samplings do not meet."""


def _step(given: Given) -> _Step:
    """Returns what a step is here: in TRL both sampling and updates come after a number of micro-batches.

    Completions are sampled every ``steps_per_generation × num_iterations`` micro-batches, each of which is a share of them, and
    an update is made every ``gradient_accumulation_steps`` (``_prepare_inputs`` of TRL's trainers).
    """
    micro = _at_once(given)
    per_update, iterations = count(given.many("gradient_accumulation_steps")), count(given.many("num_iterations"))
    name = "generation_batch_size" if "generation_batch_size" in given else "steps_per_generation"
    shares, remark = given.many(name, per_update), ""
    if name == "generation_batch_size":
        shares /= micro
    if shares != round(shares) or shares < 1:
        remark = f"; TRL refuses this {name}: it is no multiple of {shown(micro)}"
    shares = count(shares)
    if shares % per_update == 0:
        return _Step(micro * shares, shares // per_update, iterations, remark)
    if per_update % shares == 0 and shares * iterations % per_update == 0:
        return _Step(micro * shares, 1, shares * iterations // per_update, remark)
    if per_update % (shares * iterations) == 0:
        samplings = per_update // (shares * iterations)
        remark = f"; sampled {shown(micro * shares)} at a time there, for one update{remark}"
        return _Step(micro * shares * samplings, 1, 1, remark)
    mixed = (
        f"TRL samples every {shares * iterations} micro-batches and updates every {per_update}, so that an update mixes"
        " completions of several policies; here each step has whole updates"
    )
    return _Step(micro * per_update, 1, 1, remark, mixed)


def updates(given: Given) -> int:
    """Returns the optimizer updates in one of our steps."""
    if given.method not in SAMPLED:
        return 1
    step = _step(given)
    return step.minibatches * step.epochs


def _prompts(given: Given) -> int:
    """Returns the prompts of one of our steps."""
    return count(_step(given).completions / given.many("num_generations"))


def batch(option: Option, given: Given) -> Outcome:
    together = "all processes together" if processes(given) > 1 else "one process"
    together += f", of which {of_one_row(given)} share each row" if of_one_row(given) > 1 else ""
    if given.method not in SAMPLED:
        rows = _at_once(given) * given.many("gradient_accumulation_steps")
        if given.method == "sft" and given.is_on("packing"):
            packed = f"{shown(rows)} packed rows per optimizer update there, each of several rows of the data"
            return ask(f"{packed}; here rows of the data: that many times how many fit into max_length", "train.batch_size")
        return to({"train.batch_size": count(rows)}, f"rows or pairs per optimizer update, {together}")
    step = _step(given)
    prompts = step.completions / given.many("num_generations")
    if step.mixed:
        nearest = f"near it is {count(prompts)} with one minibatch, one update per step, with which other settings are counted"
        return ask(f"{step.mixed}; {nearest}", "train.batch_size")
    settings = {"train.batch_size": count(prompts), "train.minibatches": step.minibatches}
    per_prompt = f"{given['num_generations'].value} per prompt, {together}{rounded(prompts)}{step.remark}"
    return to(settings, f"{shown(step.completions)} completions / {per_prompt}")


def iterations(option: Option, given: Given) -> Outcome:
    """Converts the uses of each completion; those within one update are one, as their mean is the same."""
    step = _step(given)
    if step.mixed:
        return ask(step.mixed, "train.epochs") if option.number != 1 else to({"train.epochs": 1})
    whole = step.epochs == option.number
    return to({"train.epochs": step.epochs}, "" if whole else "the other uses of a completion are within one update there")


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
    return run_steps(option, _prompts(given), rows_of(given["dataset_name"].texts))


def moving_reference(option: Option, given: Given) -> Outcome:
    """Handles a reference that moves after a number of updates (``SyncRefModelCallback``); here after a number of steps."""
    if not given.is_on("sync_ref_model"):
        return same("off, as it is here")
    if given.method in SAMPLED and not given.number("beta"):
        return same("beta is 0: there is no reference")
    steps = given.many("ref_model_sync_steps", 512) / updates(given)
    remark = f"{updates(given)} updates per step{rounded(steps)}" if updates(given) > 1 else ""
    settings = {"share": given.number("ref_model_mixup_alpha", 0.6), "every": count(steps)}
    named = {f"with.moving_reference.{key}": value for key, value in settings.items()}
    return to(named, remark)


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
        steps = run_steps(given["num_train_epochs"], _prompts(given), rows).settings.get("train.steps")
        return steps and int(steps) * updates(given)
    size = batch(given["num_train_epochs"], given).settings.get("train.batch_size")  # packed rows have none
    return size and int(rows * given.number("num_train_epochs", 1) // size)


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
