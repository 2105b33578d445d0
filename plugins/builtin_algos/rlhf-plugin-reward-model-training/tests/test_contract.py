"""The host's contract, check by check, for the training of reward models and process reward models."""

from rlhf_authoring import algorithm_contract

TestRewardModel = algorithm_contract("rm")
TestCentered = algorithm_contract("rm", {"center_rewards_coefficient": 0.1, "margin": "off"})
TestProcessRewardModel = algorithm_contract("prm")
TestLastStep = algorithm_contract("prm", {"separator": "END", "last_step_only": True})
