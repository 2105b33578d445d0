"""Losses: sequences as GSPO has them, and the KL in a loss or among the rewards."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from .known import GRPO, PLAUSIBLE, PPO, flag, unset

VERL_GSPO = "python -m verl.trainer.main_ppo actor_rollout_ref.actor.policy_loss.loss_mode=gspo algorithm.adv_estimator=grpo"


@pytest.mark.parametrize(
    "command",
    [
        f"{PPO} --advantage_estimator rloo --n_samples_per_prompt 4 --policy_loss_type gspo --eps_clip_low_high 0.01 0.02",
        f"{GRPO} --importance_sampling_level sequence --loss_type grpo --epsilon 0.01 --epsilon_high 0.02",
        f"{VERL_GSPO} actor_rollout_ref.actor.clip_ratio_low=0.01 actor_rollout_ref.actor.clip_ratio_high=0.02",
    ],
)
def test_the_limits_of_gspo(translated, script, command):
    algo = translated(script(command))[2]["algo"]
    assert (algo["loss"], algo["gspo_eps"], algo["gspo_eps_high"]) == ("gspo", 0.01, 0.02)
    assert "clip_eps" not in algo


def test_other_aggregations_of_gspo(translated, script):
    """Defaults of both projects, which our loss refuses."""
    for command in (f"{GRPO} --importance_sampling_level sequence", VERL_GSPO):
        _, text, values = translated(script(command))
        assert "aggregation" not in values["algo"]
        assert "token-mean: gspo is a mean over sequences here" in text or "dapo: gspo is a mean over sequences here" in text


@pytest.mark.parametrize(
    ("loss", "algo"),
    [("dr_grpo", ("grpo", "gspo", "none")), ("sapo", ("grpo", "sapo", None)), ("grpo", ("grpo", "gspo", None))],
)
def test_ratios_of_sequences_with_other_losses_of_trl(translated, script, loss, algo):
    said, _, values = translated(script(f"{GRPO} --importance_sampling_level sequence --loss_type {loss}"))
    assert (values["algo"]["name"], values["algo"]["loss"], values["algo"].get("std")) == algo
    assert ("the ratio of sapo is that of a token here" in said) == (loss == "sapo")


def test_gspo_that_samples_ahead_is_accepted(translated, script, rlhf_here, tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(json.dumps({"input": "1+1=", "label": "2"}) + "\n")
    command = f"{PPO} --advantage_estimator rloo --n_samples_per_prompt 4 --policy_loss_type gspo --train.async_enable"
    _, text, values = translated(script(f"{command} --vllm_num_engines 1\n"))
    assert (values["train"]["old_logprobs"], values["with"]["tis"]) == ("recompute", {"name": "tis"})
    assert "sampling ahead needs a correction: tis" in re.sub(r"\n *# +", " ", text)
    flags = ["--actor.model", tiny_model, "--data", "rows.jsonl", "--run-dir", "run", "--reward", "math_verifier"]
    flags += [word for key in unset(values) for word in (flag(key), PLAUSIBLE.get(key, "2"))]
    done = rlhf_here("train", "--config", "ours.yaml", *flags, "--dry-run")
    assert done.exit_code == 0, done.output


def test_the_kl_in_trls_loss(translated, script):
    _, text, values = translated(script(f"{GRPO} --beta 0.1 --loss_type dr_grpo --max_completion_length 64\n"))
    kl = values["kl"]
    assert "use_bias_correction_kl is on there by default" in text
    assert kl == {"coef": 0.1, "place": "loss", "estimator": "unbiased", "aggregation": "sequence-mean-token-sum-over(64)"}
    kl = translated(script(f"{GRPO} --beta 0.1 --use_bias_correction_kl False\n"))[2]["kl"]
    assert kl == {"coef": 0.1, "place": "loss", "estimator": "k3"}


def test_openrlhfs_kl_after_the_groups_statistics(translated, script):
    remark = "there each token gets the KL from it to the end"
    command = f"{PPO} --advantage_estimator group_norm --n_samples_per_prompt 4"
    assert remark in translated(script(command))[1]
    assert remark not in translated(script(f"{command} --use_kl_loss"))[1]
