"""The host's contract, check by check."""

from rlhf_authoring import extension_contract

TestAdaptive = extension_contract("curriculum")
TestPools = extension_contract("curriculum", {"strategy": "pools", "retire": 0.9})
