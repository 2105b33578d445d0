"""The contract of every tracker, with the real MLflow."""

import pytest
from rlhf_authoring import tracker_contract

pytest.importorskip("mlflow", reason="needs mlflow: make test-trackers")
TestContract = tracker_contract("mlflow")
