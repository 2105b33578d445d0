"""The snapshot of the API is current, so that a change of it is seen in a diff."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

HERE = Path(__file__).parent

HOW = """

Record the change with

    python scripts/api_snapshot.py

and look at the change of tests/api/snapshot.json: docs/contributing.md says which are allowed."""


@pytest.fixture
def now(api):
    return json.loads(json.dumps(api.describe()))


def leaves(value, path=()):
    """``(path, value)`` of everything in nested dicts and lists; items of a list go by their text."""
    items = value.items() if isinstance(value, dict) else zip(value, value, strict=True) if isinstance(value, list) else ()
    found = [leaf for key, inner in items for leaf in leaves(inner, (*path, str(key)))]
    return found or [(path, value)]


def test_the_snapshot_is_the_api(now):
    recorded = json.loads((HERE / "snapshot.json").read_text(encoding="utf-8"))
    old, new = ({"/".join(path): value for path, value in leaves(tree)} for tree in (recorded, now))
    changed = sorted(key for key in old.keys() | new.keys() if old.get(key, ...) != new.get(key, ...))
    lines = [f"  {key}: recorded {old.get(key, 'nothing')!r}, now {new.get(key, 'nothing')!r}" for key in changed]
    order = json.dumps(recorded) != json.dumps(now)
    assert not lines, "the API is not the one recorded:\n" + "\n".join(lines) + HOW
    assert not order, "hooks, arguments or fields stand in another order than recorded" + HOW
