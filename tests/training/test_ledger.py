"""The file that says what became of every draw."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from rlhf_host.errors import RunError
from rlhf_host.training.ledger import Ledger

OUTCOMES = [("data", 4, "trained"), ("data", 7, "dropped: equal_rewards"), ("data", 1, "trained")]


def draws(*numbers):
    return [(number, *outcome) for number, outcome in zip(numbers, OUTCOMES, strict=False)]


@pytest.fixture
def ledger(tmp_path):
    made = Ledger(tmp_path)
    for step in range(1, 4):
        made.note(step, step - 1, draws(*range(3 * step - 3, 3 * step)))
    return made


def rows(ledger):
    return [json.loads(line) for line in ledger.path.read_text().splitlines()]


def test_every_draw_is_in_one_line(ledger):
    assert [(row["step"], row["version"], [draw[0] for draw in row["draws"]]) for row in rows(ledger)] == [
        (1, 0, [0, 1, 2]),
        (2, 1, [3, 4, 5]),
        (3, 2, [6, 7, 8]),
    ]
    assert rows(ledger)[0]["draws"][1] == [1, "data", 7, "dropped: equal_rewards"]
    ledger.check({"ordinal": 9})
    with pytest.raises(
        RunError, match="has the first 9 draws and 0 later ones, and the data's order the first 8 and 0 later ones"
    ):
        ledger.check({"ordinal": 8})


def test_later_draws_may_be_in_earlier_lines(ledger):
    ledger.note(4, 3, draws(10, 12))
    ledger.check({"ordinal": 9, "passed": [10, 12]})
    with pytest.raises(RunError, match="and 2 later ones, and"):
        ledger.check({"ordinal": 9, "passed": [10, 11]})
    again = Ledger(ledger.path.parent)
    again.go_back(4, {"ordinal": 9, "passed": [10, 12]})
    again.note(5, 4, draws(9, 11))
    again.check({"ordinal": 13})


@pytest.mark.parametrize("number", [4, 10])
def test_a_draw_is_not_noted_twice(ledger, number):
    ledger.note(4, 3, draws(10))
    with pytest.raises(RunError, match=r"step 5 has a draw that .* has already"):
        ledger.note(5, 4, draws(9, number))


def test_a_resumed_run_goes_on_after_its_checkpoint(ledger, caplog):
    again = Ledger(ledger.path.parent)
    with ledger.path.open("a") as file:
        file.write('{"step": 4, "ver')  # killed
    again.go_back(2, {"ordinal": 6})
    assert [row["step"] for row in rows(again)] == [1, 2]
    again.note(3, 2, draws(6, 7, 8))
    again.check({"ordinal": 9})
    assert not caplog.messages


@pytest.mark.parametrize("change", ["a line is gone", "a draw is gone", "no JSON", "no file"])
def test_a_file_that_lacks_draws_is_told(ledger, caplog, change):
    lines = ledger.path.read_text().splitlines(keepends=True)
    if change == "a line is gone":
        del lines[0]
    elif change == "a draw is gone":
        lines[0] = json.dumps({**json.loads(lines[0]), "draws": draws(0, 1)}) + "\n"
    elif change == "no JSON":
        lines[1] = "?\n"
    ledger.path.write_text("".join(lines))
    if change == "no file":
        ledger.path.unlink()
    again = Ledger(ledger.path.parent)
    again.go_back(3, {"ordinal": 9})
    [message] = caplog.messages
    assert "ledger.jsonl does not have every draw up to step 3" in message
    again.note(4, 3, draws(9, 10))
    assert rows(again)[-1]["draws"][0][0] == 9


def test_reasons_may_have_any_characters(ledger):
    odd = "a\u2028b\x85c\ud800d"
    ledger.note(4, 3, [(9, "data", 0, f"dropped: {odd}")])
    again = Ledger(ledger.path.parent)
    again.go_back(4, {"ordinal": 10})
    assert [row["step"] for row in rows(again)] == [1, 2, 3, 4]
    assert rows(again)[-1]["draws"][0][-1] == f"dropped: {odd}"


@pytest.mark.parametrize("torn", [b'{"step": 4, "ver', b"\xff\xfe"])
def test_what_a_killed_run_wrote_last_is_no_reason_to_warn(ledger, caplog, torn):
    with ledger.path.open("ab") as file:
        file.write(torn)
    again = Ledger(ledger.path.parent)
    again.go_back(3, {"ordinal": 9})
    assert not caplog.messages
    assert [row["step"] for row in rows(again)] == [1, 2, 3]


def test_bytes_that_are_no_text_are_told(ledger, caplog):
    ledger.path.write_bytes(b"\xff\xfe\n" + ledger.path.read_bytes())
    Ledger(ledger.path.parent).go_back(3, {"ordinal": 9})
    assert "does not have every draw" in caplog.text


FULL = """
import resource, sys
from pathlib import Path
from rlhf_host.directories import Lines

path = Path(sys.argv[1])
lines = Lines(path)
lines.add(b"x" * 60 + b"\\n")
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
lines.add(b"y" * 60 + b"\\n")
assert path.read_bytes() == b"x" * 60 + b"\\n", "no part of a line"
lines.add(b"z" * 60 + b"\\n")
try:
    lines.flush()
    raise SystemExit("it was written")
except OSError:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
lines.add(b"!\\n")
assert path.read_text().split() == ["x" * 60, "y" * 60, "z" * 60, "!"]
"""


def test_lines_that_a_full_disk_refuses_are_written_later(tmp_path):
    done = subprocess.run([sys.executable, "-c", FULL, tmp_path / "lines"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("its lines are kept until there is room") == 1


def test_a_new_run_begins_with_an_empty_file(ledger):
    Ledger(ledger.path.parent).go_back(0, {})
    assert ledger.path.read_text() == ""
