"""The host's contract, check by check, for SFT."""

from rlhf_host.testing import algorithm_contract

TestSFT = algorithm_contract("sft")
