from __future__ import annotations

from rlhf_authoring import command_contract

TestServeTraining = command_contract("serve-training")
