"""The contract of every tracker, with the real TensorBoard."""

from rlhf_authoring import tracker_contract

TestContract = tracker_contract("tensorboard")
