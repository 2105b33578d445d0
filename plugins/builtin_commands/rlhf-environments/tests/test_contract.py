from __future__ import annotations

from rlhf_authoring import command_contract

TestExport = command_contract("env.export")
TestAdd = command_contract("env.add")
TestList = command_contract("env.list")
