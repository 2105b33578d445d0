"""The core's own sync keeps the contract that it asks of others."""

from __future__ import annotations

from rlhf_authoring import weight_sync_contract

TestInProcess = weight_sync_contract("in_process")
