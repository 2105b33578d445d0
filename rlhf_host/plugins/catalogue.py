"""What the project itself publishes. Only these names ever get an install line: guessing package names invites squatters."""

from __future__ import annotations

CATALOGUE: dict[str, dict[str, str]] = {
    "algo": {
        "ppo": "rlhf-plugin-ppo",
        "reinforce_pp": "rlhf-plugin-reinforce-pp",
        "grpo": "rlhf-plugin-grpo",
        "rloo": "rlhf-plugin-rloo",
        "dapo": "rlhf-plugin-dapo",
        "dpo": "rlhf-plugin-dpo",
    },
    "reward": {"math_verifier": "rlhf-plugin-math-verifier"},
    "agent": {"multi_turn": "rlhf-plugin-multi-turn", "nemo_gym": "rlhf-plugin-nemo-gym"},
}
"""Kind → plugin name → distribution."""
