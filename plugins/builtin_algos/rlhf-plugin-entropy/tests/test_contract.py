"""The host's contract, check by check."""

from rlhf_authoring import extension_contract

TestClipCov = extension_contract("clip_cov", {"share": 0.1, "low": 0.0})
TestKLCov = extension_contract("kl_cov", {"share": 0.1})
TestTopEntropy = extension_contract("top_entropy")
