from __future__ import annotations

from rlhf_authoring import command_contract

TestPlan = command_contract("plan")
