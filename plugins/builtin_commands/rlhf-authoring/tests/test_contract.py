from __future__ import annotations

from rlhf_authoring import command_contract

TestDoctor = command_contract("doctor")
TestNew = command_contract("plugins.new")
TestCheck = command_contract("plugins.check")
TestBench = command_contract("plugins.bench")
TestSearch = command_contract("plugins.search")
TestInstall = command_contract("plugins.install")
TestUninstall = command_contract("plugins.uninstall")
TestRequirements = command_contract("plugins.requirements")
