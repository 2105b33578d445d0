"""The script that describes the API, as a module."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..scripts_as_modules import load_script

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def api():
    return load_script("scripts/api_snapshot.py")
