"""The host's contract, check by check."""

from rlhf_authoring import algorithm_contract

TestMaxRL = algorithm_contract("maxrl")
TestOPO = algorithm_contract("opo")
TestOTB = algorithm_contract("otb")
TestOTBTail = algorithm_contract("otb", {"zero_tail": True})
TestGiGPO = algorithm_contract("gigpo")
TestGiGPODivided = algorithm_contract("gigpo", {"std": "group", "gamma": 1.0})
TestGMPO = algorithm_contract("gmpo")
TestLUSPO = algorithm_contract("luspo")
TestVESPO = algorithm_contract("vespo")
