"""The host's contract, check by check, for online DPO."""

from rlhf_authoring import algorithm_contract

TestOnlineDPO = algorithm_contract("online_dpo")
TestNLL = algorithm_contract("online_dpo", {"loss": "sigmoid", "nll_coef": 0.5, "label_smoothing": 0.1})
TestReferenceFree = algorithm_contract("online_dpo", {"loss": "sigmoid_norm", "reference_free": True, "gamma": 0.5})
