"""The contract of every tracker, with the real Trackio."""

import os
import tempfile

import pytest
from rlhf_authoring import tracker_contract

os.environ["TRACKIO_DIR"] = tempfile.mkdtemp(prefix="trackio-")  # read as it is imported
pytest.importorskip("trackio", reason="needs trackio: make test-trackers")
TestContract = tracker_contract("trackio")
