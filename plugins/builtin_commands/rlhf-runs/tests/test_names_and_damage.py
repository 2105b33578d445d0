"""Runs by their name, texts as they are, and files that cannot be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf_host import RunDirectory, UserError
from rlhf_host.runs import named_run, run_model, run_of


@pytest.fixture
def here(make, tmp_path, monkeypatch):
    """A folder with ``runs/first``, ``runs/second``, and files of similar names."""
    monkeypatch.chdir(tmp_path)
    for name in ("first", "second"):
        run = make(name)
        (run / "model").mkdir()
        (run / "model/config.json").write_text("{}")
    (tmp_path / "first.log").write_text("x")
    (tmp_path / ".lock").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [["show", "first"], ["compare", "first", "second"], ["report", "first"], ["episodes", "first/trajectories"]],
)
def test_a_name_of_the_table_is_a_run(rlhf_here, here, words):
    done = rlhf_here(*words)
    expected = 2 if words[0] == "episodes" else 0  # these rows have no episodes
    assert done.exit_code == expected, done.output
    assert "no such" not in done.output
    if words[0] == "show":
        assert done.stdout.startswith("runs/first: finished at step 20")


@pytest.mark.usefixtures("here")
def test_models_are_found_by_the_name_of_their_run():
    assert str(run_model(named_run(Path("first"))).path) == "runs/first/model"
    assert str(run_model(Path("first/model")).path) == "runs/first/model"
    assert str(run_of(Path("first"))) == "runs/first"
    assert str(run_of(Path("runs/first/model"))) == "runs/first"


def test_what_is_in_this_folder_comes_before_runs(here):
    (here / "first").mkdir()
    with pytest.raises(UserError, match=r"first has no config\.yaml"):
        RunDirectory("first")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["show", "frist"], "frist: no such run directory; did you mean 'first'?"),
        (["show", "runs/frist"], "runs/frist: no such run directory; did you mean 'runs/first'?"),
        (["show", "first.log"], "first.log is a file: a run directory is what rlhf train writes"),
        (["show", ".lokc"], ".lokc: no such run directory (a run that has just begun has none yet)"),
        (["export", "frist", "--output", "x"], "frist: no such directory; did you mean 'first'?"),
        (["export", "first.log", "--output", "x"], "first.log is a file: give a model directory"),
        (["episodes", "frist"], "frist: no such file or directory; did you mean 'first'"),
        (["compare", "first", "runs/first"], "runs/first is given twice"),
    ],
)
def test_what_is_suggested_is_a_run_and_exists(rlhf_here, here, words, said):
    done = rlhf_here(*words)
    assert done.exit_code == 2
    assert f"Error: {said}" in done.output


ODD = "a[b] [red]c[/red] [/]"


def test_square_brackets_are_shown(rlhf_here, make):
    run = make("x[1]", settings={"algo": {"name": "rloo", "about": ODD}})
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward/mean": 1.0, "eval/[x]/score": 1.0}) + "\n")
    other = make("x[2]")
    assert rlhf_here("runs", run.parent).stdout.splitlines()[1].split()[0] == "x[1]"
    assert "eval/[x]/score" in rlhf_here("show", run).stdout
    said = rlhf_here("compare", run, other, "--metric", "reward/mean").stdout
    assert all(text in said for text in ("x[1]", "x[2]", ODD))


def test_metric_names_of_an_evaluation_keep_their_brackets(capsys):
    from rlhf_host.cli.eval import _print_table

    _print_table({"eval/a[b].jsonl/score/mean": 1.0, "eval/[/]/score/mean": 1.0})
    said = capsys.readouterr().out
    assert all(name in said for name in ("eval/a[b].jsonl/score/mean", "eval/[/]/score/mean"))


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("metrics.jsonl", b"\x80\x81\xff", "metrics.jsonl:1: damaged, left out: not a JSON object"),
        ("metrics.jsonl", b'{"step": 1, "loss": 1}\n{"step\n[3]\n{"step": 4, "loss": 1}\n', "metrics.jsonl:2: damaged"),
        ("trajectories/train-step-000020.jsonl", b"garbage\n", "trajectories/train-step-000020.jsonl:1: damaged"),
        ("ledger.jsonl", b"{}\n{\n", "ledger.jsonl:2: damaged"),
        ("plugins.json", b"{", "plugins.json is damaged or missing"),
    ],
)
def test_what_cannot_be_read_is_said_with_its_place(rlhf_here, make, tmp_path, file, content, said):
    run, whole = make("one", about={"step": 20}), make("two")
    (run / file).write_bytes(content)
    shown = rlhf_here("show", run)
    assert shown.exit_code == 0
    assert f"Warning: {run}/{said}" in " ".join(shown.stdout.split()).replace("- ", "-"), shown.stdout
    if content == b"\x80\x81\xff":
        assert f"{run}: finished at step 20 of 20" in shown.stdout
    assert said in rlhf_here("report", run, "-o", tmp_path / "page.html").stderr or "ledger" in file or "plugins" in file
    if "trajectories" in file:
        (run / file.replace("train", "eval")).unlink()
        (whole / file.replace("train", "eval")).unlink()
    elif "metrics" in file:
        assert said in rlhf_here("runs", run.parent).stderr
    if "trajectories" in file or "metrics" in file:
        assert f"{run}/{said}" in rlhf_here("compare", run, whole).stdout


def test_both_broken_lines_are_counted(make):
    run = make("one")
    (run / "metrics.jsonl").write_text('{"step": 1}\n{"step\n[3]\n')
    found = RunDirectory(run)
    assert found.step == 1
    assert found.damage == [f"{run}/metrics.jsonl:2: damaged, left out: not a JSON object, and 1 more such lines"]


def test_half_a_line_at_the_end_of_a_killed_run_is_no_damage(make):
    run = make("one", about={"status": "running"})
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "lo')
    found = RunDirectory(run)
    assert (found.step, found.damage) == (20, [])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda run: (run / "config.yaml").write_text("train: {}\n"), "left out: {run}/config.yaml has no train.steps"),
        (lambda run: (run / "config.yaml").write_text("a: [\n"), "left out: {run}/config.yaml"),
        (lambda run: (run / "plugins.json").unlink(), "left out: {run} has no plugins.json"),
        (lambda run: (run / "config.yaml").unlink(), "left out: {run} has no config.yaml"),
    ],
)
def test_a_run_that_is_left_out_of_the_table_is_named(rlhf_here, make, change, said):
    run, _ = make("one"), make("two")
    change(run)
    done = rlhf_here("runs", run.parent)
    assert said.format(run=run) in done.stderr
    assert "two" in done.stdout


@pytest.mark.parametrize("command", ["show", "compare"])
def test_nothing_is_printed_before_a_metric_that_there_is_not(rlhf_here, make, command):
    runs = [make("one"), make("two")][: 1 if command == "show" else 2]
    done = rlhf_here(command, *runs, "--metric", "reward/mean", "--metric", "nosuch")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "has no metric 'nosuch'" in done.stderr
