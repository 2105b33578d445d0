"""The host's contract, check by check, for the reward model."""

from rlhf_authoring import reward_contract

TestSameTokens = reward_contract("reward_model")
TestText = reward_contract("reward_model", {"template": "text", "normalize": "running", "clip": 5.0, "score": "sigmoid"})
TestProcess = reward_contract("prm")
TestSteps = reward_contract("prm", {"template": "text", "tag": ";", "separator": " ", "place": "steps", "aggregate": "mean"})
