"""The host's contract, check by check."""

from rlhf_authoring import extension_contract

TestReplayBuffer = extension_contract("replay_buffer")
