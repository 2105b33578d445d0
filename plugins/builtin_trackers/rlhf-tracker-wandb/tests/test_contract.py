"""The contract of every tracker, with the real wandb, which sends nothing."""

from rlhf_authoring import tracker_contract

TestContract = tracker_contract("wandb", {"mode": "disabled"})
