"""The host's contract, check by check, for distillation on data and on the student's answers."""

from rlhf_authoring import algorithm_contract

TestDistill = algorithm_contract("distill", {"alpha": 0.7, "temperature": 2.0})
TestMiddle = algorithm_contract("distill", {"beta": 0.5})
TestReverseTop = algorithm_contract("distill", {"beta": 1.0, "top_k": 4})
TestRenormalised = algorithm_contract("distill", {"top_k": 4, "tail": "renormalise", "temperature": 2.0})
TestOnPolicySample = algorithm_contract("on_policy_distill")
TestOnPolicyFull = algorithm_contract("on_policy_distill", {"signal": "full", "top_k": 4})
