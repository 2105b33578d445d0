"""The script that describes the API, as a module."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def api():
    spec = importlib.util.spec_from_file_location("api_snapshot", ROOT / "scripts/api_snapshot.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
