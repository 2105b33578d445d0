"""The host's own syncs keep the contract that it asks of others."""

from __future__ import annotations

import tempfile

from rlhf_authoring import weight_sync_contract

directory = tempfile.TemporaryDirectory()

TestInProcess = weight_sync_contract("in_process")
TestBroadcast = weight_sync_contract("broadcast")
TestIPC = weight_sync_contract("ipc")
TestCheckpoint = weight_sync_contract("checkpoint", {"directory": directory.name})
