from __future__ import annotations

from rlhf_authoring import command_contract

TestRuns = command_contract("runs")
TestShow = command_contract("show")
TestCompare = command_contract("compare")
TestView = command_contract("view")
TestReport = command_contract("report")
TestEpisodes = command_contract("episodes")
TestExport = command_contract("export")
TestPush = command_contract("push")
TestMergeLora = command_contract("merge-lora")
