from __future__ import annotations

from rlhf_authoring import command_contract

TestData = command_contract("data")
TestShow = command_contract("data.show")
TestClear = command_contract("data.clear")
