from __future__ import annotations

from rlhf_host.testing import command_contract

TestTranslate = command_contract("translate")
