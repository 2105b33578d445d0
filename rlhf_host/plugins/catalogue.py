"""What the project itself publishes. Only these names ever get an install line: guessing package names invites squatters."""

from __future__ import annotations

PIP = "pip install --find-links dist"
"""What installs from the catalogue. It is on no package index yet: ``make wheels`` fills ``dist``."""

CATALOGUE: dict[str, dict[str, str]] = {
    "algo": {
        "cdpo": "rlhf-plugin-dpo",
        "distill": "rlhf-plugin-distill",
        "dpo": "rlhf-plugin-dpo",
        "dr_grpo": "rlhf-plugin-grpo",
        "gdpo": "rlhf-plugin-grpo",
        "grpo": "rlhf-plugin-grpo",
        "ipo": "rlhf-plugin-dpo",
        "kto": "rlhf-plugin-kto",
        "on_policy_distill": "rlhf-plugin-distill",
        "online_dpo": "rlhf-plugin-online-dpo",
        "ppo": "rlhf-plugin-ppo",
        "prm": "rlhf-plugin-reward-model-training",
        "raft": "rlhf-plugin-raft",
        "reinforce_pp": "rlhf-plugin-reinforce-pp",
        "reinforce_pp_baseline": "rlhf-plugin-reinforce-pp",
        "rloo": "rlhf-plugin-rloo",
        "rm": "rlhf-plugin-reward-model-training",
        "sft": "rlhf-plugin-sft",
    },
    "agent": {
        "file": "rlhf-plugin-multi-turn",
        "gymnasium": "rlhf-plugin-gymnasium",
        "multi_turn": "rlhf-plugin-multi-turn",
        "nemo_gym": "rlhf-plugin-nemo-gym",
        "openai_agent": "rlhf-plugin-openai-agent",
        "openenv": "rlhf-plugin-openenv",
        "retry": "rlhf-plugin-multi-turn",
        "textarena": "rlhf-plugin-textarena",
        "verifiers": "rlhf-plugin-verifiers",
    },
    "extension": {
        "dynamic_filtering": "rlhf-plugin-dapo",
        "icepop": "rlhf-plugin-off-policy",
        "off_policy_mask": "rlhf-plugin-off-policy",
        "overlong_masking": "rlhf-plugin-dapo",
        "overlong_penalty": "rlhf-plugin-dapo",
        "sequence_mask": "rlhf-plugin-off-policy",
        "sequence_truncate": "rlhf-plugin-off-policy",
        "stop_properly": "rlhf-plugin-dapo",
        "tis": "rlhf-plugin-off-policy",
    },
    "kernels": {"cpu": "rlhf-kernels-cpu", "liger": "rlhf-kernels-liger"},
    "preset": {
        "cispo": "rlhf-plugin-grpo",
        "dapo": "rlhf-plugin-dapo",
        "dr_grpo": "rlhf-plugin-grpo",
        "grpo": "rlhf-plugin-grpo",
        "gspo": "rlhf-plugin-grpo",
        "ppo_instructgpt": "rlhf-plugin-ppo",
        "reinforce_pp": "rlhf-plugin-reinforce-pp",
        "rloo": "rlhf-plugin-rloo",
        "scalerl": "rlhf-plugin-grpo",
        "vapo": "rlhf-plugin-ppo",
    },
    "reward": {
        "code_exec": "rlhf-plugin-code-exec",
        "format": "rlhf-plugin-format",
        "http_reward": "rlhf-plugin-http-reward",
        "llm_judge": "rlhf-plugin-llm-judge",
        "math_verifier": "rlhf-plugin-math-verifier",
        "reasoning_gym": "rlhf-plugin-reasoning-gym",
        "reward_model": "rlhf-plugin-reward-model",
    },
    "tasks": {
        "gymnasium": "rlhf-plugin-gymnasium",
        "nemo_gym": "rlhf-plugin-nemo-gym",
        "reasoning_gym": "rlhf-plugin-reasoning-gym",
        "textarena": "rlhf-plugin-textarena",
        "verifiers": "rlhf-plugin-verifiers",
    },
}
"""Kind → plugin name → distribution."""
