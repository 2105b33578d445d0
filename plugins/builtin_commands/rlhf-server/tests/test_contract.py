from __future__ import annotations

from rlhf_host.testing import command_contract

TestServe = command_contract("serve")
TestServeReward = command_contract("serve-reward")
TestChat = command_contract("chat")
