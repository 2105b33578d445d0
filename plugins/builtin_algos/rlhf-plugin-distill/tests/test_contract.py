"""The host's contract, check by check, for distillation on data and on the student's answers."""

from rlhf_authoring import algorithm_contract

TestDistill = algorithm_contract("distill", {"alpha": 0.7, "temperature": 2.0})
TestMiddle = algorithm_contract("distill", {"beta": 0.5})
TestReverseTop = algorithm_contract("distill", {"beta": 1.0, "top_k": 4})
TestRenormalised = algorithm_contract("distill", {"top_k": 4, "tail": "renormalise", "temperature": 2.0})
TestSeveral = algorithm_contract("distill", {"teachers": {"math": 1.0, "code": 0.5}, "alpha": 0.7})
TestOnPolicySeveral = algorithm_contract("on_policy_distill", {"teachers": {"math": 1.0, "code": 0.5}})
TestOnPolicySample = algorithm_contract("on_policy_distill")
TestOnPolicyFull = algorithm_contract("on_policy_distill", {"signal": "full", "top_k": 4})

WORDLESS = {"template": "{solution}{feedback} {prompt}", "solution_template": "{solution}", "feedback_template": "{feedback}"}
TestSelf = algorithm_contract("sdpo", WORDLESS)
TestSelfFull = algorithm_contract("sdpo", WORDLESS | {"signal": "full", "top_k": 4, "beta": 0.5, "teacher_share": 1.0})
TestSelfAndPolicy = algorithm_contract("sdpo", WORDLESS | {"alpha": 0.6, "teacher_share": 0.0})
