"""The contract of every tracker, with the real ClearML, offline."""

from rlhf_authoring import tracker_contract

TestContract = tracker_contract("clearml", {"mode": "offline"})
