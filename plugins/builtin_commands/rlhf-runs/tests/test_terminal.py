"""Tables in the terminal."""

from rlhf_runs.terminal import table

NAME = "20261128-030818-rloo-math_verifier"
ROWS = [[NAME, "finished after a while", "0.987"], ["short", "killed", "0.5"]]


def test_names_that_people_copy_stay_whole():
    lines = table(["run", "status", "figure"], ROWS, 50, right=("figure",), whole=("run",)).plain.splitlines()
    assert any(NAME in line for line in lines)
    assert max(map(len, lines)) <= 50
    wrapped = table(["run", "status", "figure"], ROWS, 50, right=("figure",)).plain
    assert NAME not in wrapped


def test_where_they_do_not_fit_each_row_is_a_block():
    lines = table(["run", "status", "figure"], ROWS, 42, whole=("run",)).plain.splitlines()
    assert lines[:3] == [f"run {NAME}", "  status: finished after a while", "  figure: 0.987"]
