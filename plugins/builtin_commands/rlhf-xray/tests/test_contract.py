from __future__ import annotations

from rlhf_authoring import command_contract

TestXray = command_contract("xray")
