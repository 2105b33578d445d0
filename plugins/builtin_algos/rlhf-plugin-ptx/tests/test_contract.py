"""The host's contract, check by check."""

from pathlib import Path

from rlhf_authoring import extension_contract

TestPTX = extension_contract("ptx", {"data": str(Path(__file__).with_name("rows.jsonl"))})
