"""The host's contract, check by check, with the stand-in for CUDA graphs."""

from rlhf_authoring import kernels_contract

TestContract = kernels_contract("graphs")
