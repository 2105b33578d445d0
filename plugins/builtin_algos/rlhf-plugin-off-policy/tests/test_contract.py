"""The host's contract, check by check, for the corrections."""

from rlhf_authoring import extension_contract

TestTIS = extension_contract("tis")
TestInterval = extension_contract("tis", {"low": 0.5, "high": 1.5})
TestIcePop = extension_contract("icepop")
TestSequenceTruncate = extension_contract("sequence_truncate")
TestSequenceMask = extension_contract("sequence_mask")
TestGeometric = extension_contract("sequence_mask", {"statistic": "geometric", "low": 0.5, "high": 2.0, "token_weight": "one"})
TestK3 = extension_contract("sequence_mask", {"statistic": "k3", "high": 0.1, "token_weight": "token_truncated"})
TestM2PO = extension_contract("m2po", {"threshold": 0.002})
TestOffPolicyMask = extension_contract("off_policy_mask")
