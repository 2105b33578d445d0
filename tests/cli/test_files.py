"""``--reward FILE.py:NAME`` and ``--agent FILE.py:NAME``: what they stand for, and what is said of files that will not do."""

from __future__ import annotations

import json
import re

import pytest
import yaml

REWARDS = """
from beside import half

def right(text, label):
    return half(float(text.strip() == str(label)))

def long(completions, **columns):
    import beside_later
    return [float(len(text)) for text in completions]
"""


@pytest.fixture
def train(rlhf_here, small_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "beside.py").write_text("def half(value): return value / 2\n")
    (tmp_path / "beside_later.py").write_text("")
    start = [flag for flag in small_run]
    place = start.index("--reward")
    plain = start[:place] + start[place + 2 :]
    return lambda *flags: rlhf_here(*plain, "--train.steps", "1", "--run-dir", "run", *flags)


def test_functions_of_a_file_judge_together_and_are_found_again(train, rlhf_here, tmp_path, caplog):
    done = train("--reward", "rewards.py:right", "--reward", "len=rewards.py:long", "--reward.len.weight", "0.1")
    assert done.exit_code == 0, done.output
    [row] = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert row["reward/mean"] == pytest.approx(row["reward/right"] + 0.1 * row["reward/len"])
    saved = yaml.safe_load((tmp_path / "run/config.yaml").read_text())["reward"]
    assert (saved["len"]["name"], saved["len"]["path"]) == ("file", str(tmp_path / "rewards.py"))
    (tmp_path / "rewards.py").write_text(REWARDS + "\n# another line\n")
    again = rlhf_here("train", "--resume", "run", "--train.steps", "2")
    assert again.exit_code == 0, again.output
    assert "rewards.py has changed since the run began" in caplog.text


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("rewerds.py", "there is no Python file .*rewerds.py; did you mean 'rewards.py'"),
        ("rewards.py", r"defines right, long: say which one judges, as in rewards\.py:right"),
        ("rewards.py:rigth", "has no 'rigth'; did you mean 'right'"),
        ("broken.py", r"broken.py failed: ZeroDivisionError: .*if __name__ == '__main__'"),
        ("script.py", "script.py failed: SystemExit"),
        ("odd.py:three", r"takes \(a, b, c\).*of TRL.*of verl.*of OpenRLHF"),
        ("odd.py:number", "number is a int, not a function"),
        ("empty.py", "defines no function: say which one judges"),
    ],
)
def test_a_file_that_will_not_do_is_refused_before_anything_is_written(place, message, train, tmp_path):
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "script.py").write_text("import sys\nsys.exit('usage: script FILE')\n")
    (tmp_path / "odd.py").write_text("number = 3\ndef three(a, b, c): return 1.0\n")
    (tmp_path / "empty.py").write_text("")
    done = train("--reward", place)
    assert done.exit_code == 2, done.output

    assert re.search(message, done.output), done.output
    assert "Traceback" not in done.output
    assert not (tmp_path / "run").exists()
