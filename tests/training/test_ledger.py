"""The file that says what became of every draw."""

from __future__ import annotations

import json

import pytest

from rlhf_host.errors import RunError
from rlhf_host.training.ledger import Ledger

DRAWS = [("data", 4, "trained"), ("data", 7, "dropped: equal_rewards"), ("data", 1, "trained")]


@pytest.fixture
def ledger(tmp_path):
    made = Ledger(tmp_path)
    for step in range(1, 4):
        made.note(step, step - 1, DRAWS)
    return made


def rows(ledger):
    return [json.loads(line) for line in ledger.path.read_text().splitlines()]


def test_a_line_begins_where_the_last_one_ended(ledger):
    assert [(row["step"], row["version"], row["first"], len(row["draws"])) for row in rows(ledger)] == [
        (1, 0, 0, 3),
        (2, 1, 3, 3),
        (3, 2, 6, 3),
    ]
    ledger.check(9)
    with pytest.raises(RunError, match="has 9 draws, and the data's order 8"):
        ledger.check(8)


def test_a_resumed_run_goes_on_after_its_checkpoint(ledger, caplog):
    again = Ledger(ledger.path.parent)
    with ledger.path.open("a") as file:
        file.write('{"step": 4, "ver')  # killed
    again.go_back(2, 6)
    assert [row["step"] for row in rows(again)] == [1, 2]
    again.note(3, 2, DRAWS)
    again.check(9)
    assert not caplog.messages


@pytest.mark.parametrize("change", ["a line is gone", "a draw is gone", "no JSON", "no file"])
def test_a_file_that_lacks_draws_is_told(ledger, caplog, change):
    lines = ledger.path.read_text().splitlines(keepends=True)
    if change == "a line is gone":
        del lines[0]
    elif change == "a draw is gone":
        lines[0] = json.dumps({**json.loads(lines[0]), "draws": DRAWS[:2]}) + "\n"
    elif change == "no JSON":
        lines[1] = "?\n"
    ledger.path.write_text("".join(lines))
    if change == "no file":
        ledger.path.unlink()
    again = Ledger(ledger.path.parent)
    again.go_back(3, 9)
    [message] = caplog.messages
    assert "ledger.jsonl does not have every draw up to step 3" in message
    again.note(4, 3, DRAWS)
    assert rows(again)[-1]["first"] == 9


def test_a_new_run_begins_with_an_empty_file(ledger):
    Ledger(ledger.path.parent).go_back(0, 0)
    assert ledger.path.read_text() == ""
