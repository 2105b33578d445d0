"""The host's contract, check by check, for the training of reward models."""

from rlhf_host.testing import algorithm_contract

TestRewardModel = algorithm_contract("rm")
TestCentered = algorithm_contract("rm", {"center_rewards_coefficient": 0.1, "margin": "off"})
