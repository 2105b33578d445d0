"""The host's contract, check by check, for REINFORCE++ and its baseline."""

from rlhf_authoring import algorithm_contract

TestReinforcePP = algorithm_contract("reinforce_pp")
TestDiscounted = algorithm_contract("reinforce_pp", {"gamma": 0.9, "whiten": "center"})
TestBaseline = algorithm_contract("reinforce_pp_baseline")
