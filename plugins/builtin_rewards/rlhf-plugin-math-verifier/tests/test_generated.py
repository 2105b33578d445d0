"""Answers whose truth follows from how they are built: the files are the generator's, and few are judged otherwise."""

from __future__ import annotations

import asyncio
import importlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from rlhf_host import Unjudged

FOLDER = Path(__file__).parent / "generated"
GOALS = {"false right": 0.01, "false wrong": 0.05, "unjudged": 0.1}
FILES = sorted(FOLDER.glob("*.jsonl"))


def rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def generator() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield importlib.import_module("generate_answers")


def test_the_files_are_what_the_generator_writes(generator):
    halves = generator.generate()
    kinds = [{row["kind"] for row in half} for half in halves.values()]
    assert [len(each) for each in kinds] == [60, 59]
    assert not kinds[0] & kinds[1]
    for name, half in halves.items():
        assert half == rows(FOLDER / f"{name}.jsonl")
        assert {row["right"] for row in half} == {True, False}


@pytest.mark.parametrize("seed", range(3))
def test_no_answer_is_both_right_and_wrong(generator, seed):
    truths: dict[tuple[str, str], bool] = {}
    for row in (row for half in generator.generate(seed).values() for row in half):
        assert truths.setdefault((row["text"], row["label"]), row["right"]) == row["right"], row


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_few_are_judged_otherwise(file, verifier, trajectory):
    answers = rows(file)
    rewards = asyncio.run(verifier().score([trajectory(row["text"], row["label"]) for row in answers], None))
    verdicts = ["unjudged" if isinstance(reward, Unjudged) else reward.score == 1.0 for reward in rewards]
    counts = Counter((row["right"], verdict) for row, verdict in zip(answers, verdicts, strict=True))
    right = sum(row["right"] for row in answers)
    shares = {
        "false right": counts[False, True] / (len(answers) - right),
        "false wrong": counts[True, False] / right,
        "unjudged": verdicts.count("unjudged") / len(answers),
    }
    assert {name: share for name, share in shares.items() if share > GOALS[name]} == {}
