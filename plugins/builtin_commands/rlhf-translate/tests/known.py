"""Data of several files: commands of other projects, and what a translation asks for."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent

PPO = "python -m openrlhf.cli.train_ppo_ray --pretrain m --prompt_data p.jsonl"
GRPO = "trl grpo --model_name_or_path m --dataset_name d --reward_funcs accuracy_reward"
VERL = "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.model.path=m data.train_files=d.parquet"
DPO = "trl dpo --model_name_or_path m --dataset_name d"

UNSET = "SET THIS"
PLAUSIBLE = {"placement": "actor=2", "algo.name": "grpo", "engine.name": "vllm"}
"""Variables that a reader may set; numbers are 2."""


def unset(values, above=""):
    """Keys whose value the reader must set."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from unset(value, f"{above}{key}.")
        elif value == UNSET:
            yield f"{above}{key}"


def flat(values, above=""):
    """Dotted key → value."""
    return {
        name: value
        for key, inner in values.items()
        for name, value in (flat(inner, f"{above}{key}.") if isinstance(inner, dict) else {f"{above}{key}": inner}).items()
    }


def flag(key):
    return f"--{key.removesuffix('.name').replace('_', '-')}"


def alone(command):
    """Flags that say that a command of TRL which does not tell starts one process."""
    return ("--processes", "1") if command.startswith("trl ") and "--num_processes" not in command else ()
