"""The table of slow tests: it names what there is, leaves something to every change, and is in the docs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .tiers import SLOW

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("file", SLOW)
def test_a_row_names_tests_that_there_are(file):
    text = (ROOT / file).read_text()
    names = re.sub(r"\\\[.*?\\\]", "", SLOW[file][0])  # without values of parameters
    words = [word.strip("_") for word in re.findall(r"[a-z_]{5,}", names) if "_" in word]
    assert "def test_" in text
    assert [word for word in words if word not in text] == []


def test_the_page_for_contributors_has_the_table():
    page = (ROOT / "docs/contributing.md").read_text()
    for file, (_, why) in SLOW.items():
        assert f"| `{file}` | {why} |" in page


def test_what_stands_at_every_change_has_each_part_once():
    """Ray, vLLM, ZeRO-2 and ZeRO-3 are not in the slow tier alone."""
    assert "tests/runtimes/test_whole_stack.py" not in SLOW
    assert all(SLOW[f"tests/{file}"][0] for file in ("engines/test_vllm_start.py", "runtimes/test_ray_run.py"))
    pattern = re.compile(SLOW["tests/backends/test_ranks.py"][0])
    for kind in ("torch", "zero-2", "zero-3", "zero-3-offload", "zero-2-bf16"):
        assert not pattern.search(f"test_a_resumed_run_is_bit_for_bit_the_one_that_never_stopped[{kind}]")
    for kind in ("zero-0", "zero-3-persistent", "zero-3-bf16", "zero-2-offload-adam"):
        assert pattern.search(f"test_a_resumed_run_is_bit_for_bit_the_one_that_never_stopped[{kind}]")
