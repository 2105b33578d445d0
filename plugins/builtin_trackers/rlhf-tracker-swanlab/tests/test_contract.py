"""The contract of every tracker, with the real SwanLab, offline."""

import pytest
from rlhf_authoring import tracker_contract

pytest.importorskip("swanlab", reason="needs swanlab: make test-trackers")
TestContract = tracker_contract("swanlab", {"mode": "offline"})
