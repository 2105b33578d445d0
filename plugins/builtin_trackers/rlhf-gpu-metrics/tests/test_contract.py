"""The host's contract, check by check."""

from rlhf_authoring import extension_contract

TestContract = extension_contract("gpu_metrics", {"every_s": 0.05})
