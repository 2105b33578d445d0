"""Syncs between processes keep the contract of all others."""

from __future__ import annotations

import tempfile

from rlhf_authoring import weight_sync_contract

directory = tempfile.TemporaryDirectory()

TestBroadcast = weight_sync_contract("broadcast")
TestIPC = weight_sync_contract("ipc")
TestCheckpoint = weight_sync_contract("checkpoint", {"directory": directory.name})
