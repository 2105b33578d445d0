"""The contract of every tracker, with the real Trackio."""

import pytest
from rlhf_authoring import tracker_contract

pytest.importorskip("trackio", reason="needs trackio: make test-trackers")
TestContract = tracker_contract("trackio")
