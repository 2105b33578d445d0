"""Defects that ``scripts/plant_defects.py`` plants: each has a text to replace, in a file that there is."""

from __future__ import annotations

import tomllib
from pathlib import Path

from .scripts_as_modules import load_script

ROOT = Path(__file__).resolve().parent.parent


def test_every_defect_can_be_planted():
    defects = tomllib.loads((ROOT / "scripts/defects.toml").read_text(encoding="utf-8"))
    lost = [
        name for name, defect in defects.items() if defect["old"] not in (ROOT / defect["file"]).read_text(encoding="utf-8")
    ]
    assert len(defects) > 70
    assert not lost


def test_the_tests_beside_every_defect_are_there():
    program = load_script("scripts/plant_defects.py")
    named = {word.split("::")[0] for defect in program.known([]) for word in defect.near.split() if not word.startswith("--")}
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
