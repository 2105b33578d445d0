"""The host's contract, check by check, for RLOO."""

from rlhf_authoring import algorithm_contract

TestRLOO = algorithm_contract("rloo")
TestSuffix = algorithm_contract("rloo", {"kl_placement": "suffix", "entropy_coef": 0.01})
