from __future__ import annotations

from rlhf_authoring import command_contract

TestRollout = command_contract("rollout")
TestGenerate = command_contract("generate")
TestReplay = command_contract("replay")
