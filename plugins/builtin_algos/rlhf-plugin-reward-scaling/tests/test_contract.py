"""The host's contract, check by check."""

from rlhf_authoring import extension_contract

TestRunning = extension_contract("reward_scaling", {"normalize": "running", "high": 2.0})
TestBatch = extension_contract("reward_scaling", {"normalize": "batch"})
TestLimits = extension_contract("reward_scaling", {"low": -1.0, "high": 1.0})
