"""A home without ClearML's configuration, and runs that inherit none of ClearML's variables."""

from __future__ import annotations

from pathlib import Path

import pytest
from rlhf_authoring.trackers import SmallRun


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home without ClearML's configuration, for its note of the last task."""
    for name in ("CLEARML_OFFLINE_MODE", "CLEARML_CACHE_DIR", "CLEARML_API_ACCESS_KEY", "CLEARML_API_SECRET_KEY"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(folder))
    return folder


@pytest.fixture
def small(tmp_path: Path) -> SmallRun:
    """A small run. ClearML leaves notes for processes that belong to its task among the variables."""
    return SmallRun(tmp_path, hidden=("CLEARML_", "TRAINS_"))
