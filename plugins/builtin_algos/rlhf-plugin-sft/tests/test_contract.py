"""The host's contract, check by check, for SFT."""

from rlhf_authoring import algorithm_contract

TestSFT = algorithm_contract("sft")
