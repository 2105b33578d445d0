"""Defects that ``scripts/plant_defects.py`` plants: each has a text to replace, in a file that there is."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_every_defect_can_be_planted():
    defects = tomllib.loads((ROOT / "scripts/defects.toml").read_text(encoding="utf-8"))
    lost = [
        name for name, defect in defects.items() if defect["old"] not in (ROOT / defect["file"]).read_text(encoding="utf-8")
    ]
    assert len(defects) > 70
    assert not lost
