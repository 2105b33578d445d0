"""The host's contract, check by check."""

from pathlib import Path

from rlhf_authoring import tasks_contract

TestStreaming = tasks_contract("streaming", options={"files": str(Path(__file__).with_name("rows-{split}.jsonl")), "buffer": 1})
