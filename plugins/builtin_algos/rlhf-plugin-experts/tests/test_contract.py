"""The host's contract, check by check."""

from rlhf_authoring import extension_contract

TestRouterReplay = extension_contract("router_replay")
TestExpertMetrics = extension_contract("expert_metrics")
