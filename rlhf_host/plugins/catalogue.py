"""What the project itself publishes. Only these names ever get an install line: guessing package names invites squatters."""

from __future__ import annotations

CATALOGUE: dict[str, dict[str, str]] = {
    "algo": {"rloo": "rlhf-plugin-rloo"},
    "reward": {"math_verifier": "rlhf-plugin-math-verifier"},
}
"""Kind → plugin name → distribution."""
