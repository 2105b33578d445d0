"""The host's contract, check by check, for GRPO, Dr. GRPO and GDPO."""

from rlhf_authoring import algorithm_contract

TestGRPO = algorithm_contract("grpo")
TestBatchDeviation = algorithm_contract("grpo", {"std": "batch", "entropy_coef": 0.01})
TestTurnCredit = algorithm_contract("grpo", {"credit": "turn"})
TestDrGRPO = algorithm_contract("dr_grpo")
TestGDPO = algorithm_contract("gdpo")
