"""Contract suites: named checks of what the host relies on, for any installed plugin.

In a plugin's tests, one line::

    TestContract = algorithm_contract("rloo")

Without pytest, ``run_contract("algo", "rloo")`` gives the same checks' results.
"""

from __future__ import annotations

from rlhf_host.testing.contracts.subject import Subject
from rlhf_host.testing.contracts.suite import (
    Check,
    CheckResult,
    agent_contract,
    algorithm_contract,
    checks_of,
    extension_contract,
    kernels_contract,
    reward_contract,
    run_contract,
    tasks_contract,
    tracker_contract,
    weight_sync_contract,
)

__all__ = [
    "Check",
    "CheckResult",
    "Subject",
    "agent_contract",
    "algorithm_contract",
    "checks_of",
    "extension_contract",
    "kernels_contract",
    "reward_contract",
    "run_contract",
    "tasks_contract",
    "tracker_contract",
    "weight_sync_contract",
]
