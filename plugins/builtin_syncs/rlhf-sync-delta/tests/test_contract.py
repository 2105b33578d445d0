"""The host's contracts, check by check."""

from __future__ import annotations

import tempfile

from rlhf_authoring import command_contract, weight_sync_contract

kept, unkept = tempfile.TemporaryDirectory(), tempfile.TemporaryDirectory()

TestKept = weight_sync_contract("delta", {"directory": kept.name})
TestUnkept = weight_sync_contract("delta", {"directory": unkept.name, "keep": False, "compress": "none"})
TestBisect = command_contract("bisect")
