from __future__ import annotations

from rlhf_authoring import command_contract

TestSweep = command_contract("sweep")
