"""The table of slow tests: it names what there is, leaves something to every change, and says why."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .tiers import LONG, SLOW

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("file", SLOW)
def test_a_row_names_tests_that_there_are(file):
    text = (ROOT / file).read_text()
    names = re.sub(r"\\\[.*?\\\]", "", SLOW[file][0])  # without values of parameters
    words = [word.strip("_") for word in re.findall(r"[a-z_]{5,}", names) if "_" in word]
    assert "def test_" in text or "_contract(" in text
    assert [word for word in words if word not in text] == []


def test_long_tests_are_there():
    lost = [
        f"{file}::{name}" for file, names in LONG.items() for name in names if f"def {name}(" not in (ROOT / file).read_text()
    ]
    assert lost == []


def test_every_row_says_why_and_the_page_for_contributors_leads_here():
    assert [file for file, (_, why) in SLOW.items() if len(why.split()) < 2] == []
    assert "`tests/tiers.py` has the table" in (ROOT / "docs/contributing.md").read_text()


def test_each_distributed_part_has_one_run_at_every_change():
    """Ray, vLLM and ZeRO are not in the slow tier alone."""
    assert not re.search(
        SLOW["tests/distributed/ray/test_whole_stack.py"][0], "test_sampler_and_trainer_agree_at_every_step[1]"
    )
    assert not re.search(
        SLOW["tests/distributed/vllm/test_start.py"][0], "test_with_a_version_it_serves_the_directorys_weights"
    )
    pattern = re.compile(SLOW["tests/distributed/split/test_ranks.py"][0])
    name = "test_two_ranks_have_the_gradient_and_take_the_steps_of_one"
    assert not pattern.search(f"{name}[zero-2]")
    assert all(pattern.search(f"{name}[{kind}]") for kind in ("torch", "zero-3", "zero-2-bf16"))
