"""Runs that are accepted with a word: what plugins decide of settings left at auto, and what is hardly meant."""

from __future__ import annotations

import pytest

from rlhf_host.config.check import check
from rlhf_host.config.flags import parse
from rlhf_host.config.load import read_config
from rlhf_host.config.resolve import merge_needs, resolve
from rlhf_host.errors import UserError

PROMPTS = ("--algo", "grpo", "--reward", "math_verifier", "--actor.model", "m", "--data", "a.jsonl")
ROWS = ("--algo", "sft", "--actor.model", "m", "--data", "a.jsonl")


def checked(*flags: str):
    """The configuration as it runs, and the warnings."""
    run = resolve(read_config(flags=parse(flags)).config)
    manager = run.plugins()
    warnings = check(run, manager, merge_needs(manager))
    return run.config, warnings


def refused(*flags: str) -> str:
    with pytest.raises(UserError) as error:
        checked(*flags)
    return str(error.value)


# --- old log-probabilities where sampling runs ahead ---------------------------------------------


@pytest.mark.parametrize("with_", ["tis", "sequence_truncate", "tis,off_policy_mask", "icepop,tis"])
def test_a_correction_that_does_not_work_against_the_sampler_has_log_probabilities_recomputed(with_):
    config, (warning,) = checked(*PROMPTS, "--async-depth", "1", "--with", with_)
    assert (config.train.old_logprobs, config.old_logprobs_mode) == ("recompute", "recompute")
    assert warning.startswith("train.old_logprobs is recompute: with async_depth it would be sampler, and extension:")
    assert "the ratio is against the sampler there" in warning


def test_so_does_a_loss_that_does_not():
    config, (warning,) = checked(*PROMPTS, "--async-depth", "1", "--with", "icepop", "--algo.loss", "gspo")
    assert config.old_logprobs_mode == "recompute"
    assert "algo:grpo does not work with that (the sampler's rounding" in warning


def test_without_a_correction_it_is_told_to_take_one():
    assert refused(*PROMPTS, "--async-depth", "1", "--algo.loss", "gspo") == (
        "async_depth is 1, and with train.old_logprobs recompute nothing corrects for the versions that sampled:"
        " add a correction (--with tis)"
    )


@pytest.mark.parametrize("more", [(), ("--with", "icepop")])
def test_other_runs_compare_with_the_sampler_as_before(more):
    config, warnings = checked(*PROMPTS, "--async-depth", "1", *more)
    assert (config.train.old_logprobs, config.old_logprobs_mode, warnings) == ("auto", "sampler", [])


def test_what_somebody_chose_is_not_changed():
    assert "extension:tis does not work with train.old_logprobs sampler" in refused(
        *PROMPTS, "--async-depth", "1", "--with", "tis", "--train.old-logprobs", "sampler"
    )
    config, warnings = checked(*PROMPTS, "--async-depth", "1", "--with", "tis", "--train.old-logprobs", "fused")
    assert (config.old_logprobs_mode, warnings) == ("fused", [])


# --- what has no effect, or not the one that is meant ---------------------------------------------


@pytest.mark.parametrize(
    ("flag", "text"), [("epochs", "epochs 2 × minibatches 1"), ("minibatches", "epochs 1 × minibatches 2")]
)
@pytest.mark.parametrize("algo", ["grpo", "rloo", "ppo"])
def test_several_updates_with_a_loss_without_a_ratio_are_told_of(flag, text, algo):
    run = (*PROMPTS[2:], "--critic.model", "c") if algo == "ppo" else PROMPTS[2:]
    several = ("--algo", algo, *run, f"--train.{flag}", "2")
    assert checked(*several, "--algo.loss", "pg")[1] == [
        f"{text} make 2 updates per batch, and the loss of algo:{algo} has no ratio: nothing corrects the later updates for what"
        " the earlier ones changed; set both to 1, or choose a loss with a ratio"
    ]
    assert checked(*several)[1] == []


@pytest.mark.parametrize(
    ("flags", "warning"),
    [
        (
            (*PROMPTS, "--engine", "vllm", "--engine.sleep", "true"),
            "the engine does not sleep with runtime local, where it is in the trainer's process: choose --runtime ray",
        ),
        ((*PROMPTS, "--data.max-tokens", "9"), "the run samples answers to prompts, so data.max_tokens has no effect"),
        (
            (*PROMPTS, "--data.hh", "chat", "--eval.data", "b", "--eval.data.long-rows", "filter"),
            "the run samples answers to prompts, so data.hh, eval.data.long_rows have no effect",
        ),
        (
            (*ROWS, "--rollout.n", "2", "--rollout.stop", "x", "--rollout.temperature", "0"),
            "the run samples nothing, so rollout.n, rollout.temperature, rollout.stop have no effect",
        ),
        (
            (*PROMPTS, "--kl.coef", "0.1", "--reference.lora.rank", "8", "--reference.lr", "1"),
            "the role reference is not trained, so roles.reference.lora, roles.reference.lr have no effect",
        ),
        ((*ROWS, "--sync", "checkpoint"), "the run samples nothing, so sync checkpoint has no effect"),
        ((*ROWS, "--engine", "vllm"), "the run samples nothing, so engine vllm has no effect"),
        ((*ROWS, "--engine.max-batch-size", "8"), "the run samples nothing, so engine.max_batch_size has no effect"),
        (
            (*PROMPTS, "--with", "moving_reference"),
            "no chosen plugin reads the reference that extension:moving_reference moves: it is loaded and changes nothing",
        ),
        ((*ROWS, "--eval.data", "b", "--eval.n", "2"), "the run samples nothing, so eval.n has no effect"),
        (
            (*ROWS, "--actor.min-lr-ratio", "0.1"),
            "roles.actor.min_lr_ratio has no effect with the schedule constant: --actor.schedule cosine",
        ),
    ],
)
def test_settings_of_another_kind_of_run_are_named(flags, warning):
    assert checked(*flags)[1] == [warning]


def test_what_is_for_sampled_answers_is_refused_over_a_data_set():
    """Its penalties and filters would be left out without a word."""
    clash = "algo:sft is for prompt_completion data and extension:kl for prompts: choose one of them"
    assert refused(*ROWS, "--kl.coef", "0.1") == clash
    idle = "for sampled answers, and sft trains on prompt_completion data, which nothing samples: leave it out"
    assert refused(*ROWS, "--with", "dynamic_filtering,stop_properly").splitlines() == [
        f"extension:dynamic_filtering has keep_group {idle}",
        f"extension:stop_properly has transform_rewards {idle}",
    ]
    assert checked(*ROWS, "--kl.coef", "0.1", "--kl.place", "loss")[1] == []
