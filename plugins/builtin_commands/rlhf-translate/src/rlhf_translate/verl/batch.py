"""verl's batches, steps and schedules."""

from __future__ import annotations

import math

from rlhf_translate.options import Convert, Given, Option, Outcome, Table, ask, count, rounded, same, shown, to
from rlhf_translate.shared import rows_of, run_steps
from rlhf_translate.verl import asynchronous
from rlhf_translate.verl.algorithm import of_critic

_ACTOR = "actor_rollout_ref.actor."
_RATIO_AT_0 = (0, 8)
"""The first version in which 0 steps of warm-up leave it to the ratio."""


def batches(given: Given) -> float:
    """Returns the updates of one pass over a batch."""
    return asynchronous.prompts(given) / given.many(f"{_ACTOR}ppo_mini_batch_size")


def updates(given: Given) -> int:
    """Returns the optimizer updates in one step."""
    return count(batches(given)) * count(given.many(f"{_ACTOR}ppo_epochs"))


def minibatches(option: Option, given: Given) -> Outcome:
    if asynchronous.is_stream(given):
        batch = int(asynchronous.prompts(given))
        return to({"train.minibatches": count(batches(given)), "train.batch_size": batch}, "prompts per batch of the trainer")
    prompts = f"{given[asynchronous.batch_option(given)].value} / {given[f'{_ACTOR}ppo_mini_batch_size'].value} prompts"
    return to({"train.minibatches": count(batches(given))}, f"{prompts}{rounded(batches(given))}")


def steps(option: Option, given: Given) -> Outcome:
    return to({"train.steps": option.written}) if "trainer.total_training_steps" in given else same("passes count")


def passes(option: Option, given: Given) -> Outcome:
    if "trainer.total_training_steps" in given:
        return same("trainer.total_training_steps overrides it")
    if asynchronous.is_stream(given) and "rollout.total_rollout_steps" in given:
        return same("see rollout.total_rollout_steps")
    return run_steps(
        option,
        asynchronous.prompts(given),
        rows_of(given["data.train_files"].texts) if "data.train_files" in given else None,
        given.number("data.train_max_samples"),
    )


def warmup(role: str, theirs: str) -> Convert:
    """Converts the warm-up: in verl the rate changes once per step, here with every optimizer update."""

    def convert(option: Option, given: Given) -> Outcome:
        fixed, ratio = given.number(f"{theirs}.lr_warmup_steps", -1), given.number(f"{theirs}.lr_warmup_steps_ratio")
        key = f"{role}.warmup_steps"
        if given.version >= _RATIO_AT_0 and fixed == 0:
            fixed = -1.0
        if fixed < 0 and not ratio:
            return same("no warm-up, as it is here")
        if fixed >= 0:
            if option.name.endswith("ratio"):
                return same("lr_warmup_steps overrides it")
            remark = f"{shown(fixed)} steps of {updates(given)} updates" if updates(given) > 1 else ""
            return to({key: int(fixed) * updates(given)}, remark)
        run = asynchronous.TABLE["rollout.total_rollout_steps"](given["rollout.total_rollout_steps"], given).settings or (
            steps(given["trainer.total_training_steps"], given).settings
            or passes(given["trainer.total_epochs"], given).settings
        )
        if "train.steps" not in run:
            return ask(f"{shown(ratio)} of all steps, each of {updates(given)} optimizer updates", key)
        total = int(float(run["train.steps"]))
        remark = f"{shown(ratio)} of {total} steps of {updates(given)} updates"
        return to({key: math.floor(ratio * total) * updates(given)}, remark)

    return convert


TABLE: Table = {
    f"{_ACTOR}ppo_mini_batch_size": minibatches,
    "trainer.total_training_steps": steps,
    "trainer.total_epochs": passes,
    **{
        f"{theirs}.{name}": of(convert(role, theirs))
        for role, theirs, of in (("actor", f"{_ACTOR}optim", lambda convert: convert), ("critic", "critic.optim", of_critic))
        for name, convert in (
            ("lr_warmup_steps", warmup),
            ("lr_warmup_steps_ratio", warmup),
        )
    },
}
