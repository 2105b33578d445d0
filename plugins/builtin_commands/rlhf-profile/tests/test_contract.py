"""The host's contract, check by check."""

from rlhf_authoring import command_contract, extension_contract

TestProfile = extension_contract("profile", {"steps": "1"})
TestCommand = command_contract("profile")
