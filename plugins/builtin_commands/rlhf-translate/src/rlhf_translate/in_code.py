"""Defaults of other projects' versions that are only in their code, because they have no option for them yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ADAM = ["0.9", "0.999"]
_OPTIM = ("actor_rollout_ref.actor.optim", "critic.optim")

_VERL: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "ppo": {
        **{f"{place}.betas": {"0.2.0.post2": _ADAM, "0.6.0": None} for place in _OPTIM},
        **{f"{place}.weight_decay": {"0.2.0.post2": "0.01", "0.4.0": None} for place in _OPTIM},
        "actor_rollout_ref.actor.clip_ratio_c": {"0.2.0.post2": "None", "0.4.0": None},
        "actor_rollout_ref.actor.loss_agg_mode": {"0.2.0.post2": "token-mean", "0.4.0": None},
        "actor_rollout_ref.rollout.val_kwargs.do_sample": {"0.2.0.post2": "False", "0.3.0.post1": None},
        "actor_rollout_ref.rollout.val_kwargs.temperature": {"0.2.0.post2": "0", "0.3.0.post1": None},
        "algorithm.use_kl_in_reward": {"0.2.0.post2": "True", "0.4.0": None},
        "data.truncation": {"0.2.0.post2": "error", "0.3.0.post1": None},
        "trainer.max_actor_ckpt_to_keep": {"0.2.0.post2": "None", "0.3.0.post1": None},
    },
    "sft": {
        "optim.lr_scheduler": {"0.2.0.post2": "cosine", "0.4.0": None},
        "trainer.max_ckpt_to_keep": {"0.2.0.post2": "None", "0.4.0": None},
        "trainer.save_freq": {"0.2.0.post2": "after_each_epoch", "0.4.0": None},
        "trainer.test_freq": {"0.2.0.post2": "after_each_epoch", "0.4.0": None},
    },
}

IN_CODE: Mapping[str, Mapping[str, Mapping[str, Mapping[str, Any]]]] = {
    "openrlhf": {"ppo_ray": {"dual_clip": {"0.8.0": "None", "0.8.6": None}}},
    "trl": {
        "grpo": {
            "delta": {"0.14.0": "None", "0.18.2": None},
            "loss_type": {"0.14.0": "grpo", "0.16.1": "bnpo", "0.17.0": None},
        },
        "sft": {"max_length": {"0.14.0": "1024", "0.15.2": None}},
    },
    "verl": _VERL,
}
"""Project → program → option of later versions → version from which it is so; None from the version that has an option."""
