"""``scripts/smollm2.py`` makes a model directory whole or not at all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ..scripts_as_modules import load_script

SCRIPT = Path(__file__).parents[2] / "scripts" / "smollm2.py"


def test_a_directory_that_is_there_is_left_alone(tmp_path):
    done = subprocess.run([sys.executable, SCRIPT, tmp_path], text=True, capture_output=True, check=True)
    assert done.stdout == f"{tmp_path} is there\n"
    assert not list(tmp_path.iterdir())


def test_a_broken_file_leaves_nothing_behind(tmp_path):
    script = load_script("scripts/smollm2.py")
    (tmp_path / "model.gguf").write_bytes(b"GGUF, but cut off")
    with pytest.raises(SystemExit, match="Error: cannot load the model"):
        script.convert(tmp_path / "model.gguf", tmp_path / "models" / "model")
    assert not (tmp_path / "models").exists()
