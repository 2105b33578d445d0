"""The host's contract, check by check, for RAFT."""

from rlhf_authoring import algorithm_contract

TestRAFT = algorithm_contract("raft")
TestLimited = algorithm_contract("raft", {"keep": 2, "min_reward": -1e9})
