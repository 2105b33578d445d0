from __future__ import annotations

from rlhf_authoring import command_contract

TestServe = command_contract("serve")
TestServeReward = command_contract("serve-reward")
TestChat = command_contract("chat")
