from __future__ import annotations

from rlhf_authoring import command_contract

TestTranslate = command_contract("translate")
