"""The host's contract, check by check."""

from rlhf_authoring import extension_contract

TestLeague = extension_contract("league")
TestLatest = extension_contract("league", {"draw": "latest", "every": 2, "size": 3, "at_once": 1, "decay": 1.0})
