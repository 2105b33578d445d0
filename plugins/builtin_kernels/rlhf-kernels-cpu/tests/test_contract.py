"""The host's contract, check by check, for the CPU kernels."""

from rlhf_authoring import kernels_contract

TestContract = kernels_contract("cpu")
