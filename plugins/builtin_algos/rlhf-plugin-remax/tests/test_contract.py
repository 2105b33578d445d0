"""The host's contract, check by check, for ReMax and its agent."""

from rlhf_authoring import agent_contract, algorithm_contract

TestReMax = algorithm_contract("remax")
TestPolicyGradient = algorithm_contract("remax", {"loss": "pg", "entropy_coef": 0.01})
TestWithGreedy = agent_contract("remax")
