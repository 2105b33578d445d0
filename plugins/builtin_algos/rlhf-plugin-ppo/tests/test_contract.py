"""The host's contract, check by check, for PPO."""

from rlhf_authoring import algorithm_contract

TestPPO = algorithm_contract("ppo")
TestDiscounted = algorithm_contract("ppo", {"gamma": 0.99, "lam": 0.95, "lam_critic": 1.0, "bootstrap_truncated": True})
TestUnwhitened = algorithm_contract("ppo", {"whiten": "none", "entropy_coef": 0.01})
