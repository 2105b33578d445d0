"""The contracts of every tracker and command."""

from rlhf_authoring import command_contract, tracker_contract

TestContract = tracker_contract("prometheus", {"port": 0})
TestCommand = command_contract("prometheus")
