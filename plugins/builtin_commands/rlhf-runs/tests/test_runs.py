"""``rlhf runs``, ``show`` and ``compare``, on made-up run directories."""

from __future__ import annotations

import json

import pytest
from rlhf_runs.report import Shown

from rlhf_host import RunDirectory


def test_runs_are_listed(rlhf_here, make, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    first = make("20260101-100000-rloo-exact")
    make("20260101-110000-rloo-exact", about={"status": "running"}, steps=7)
    (first.parent / "notes").mkdir()
    result = rlhf_here("runs", first.parent)
    assert result.exit_code == 0, result.output
    head, finished, killed = result.stdout.splitlines()
    assert head.split() == ["run", "status", "step", "figure", "age", "size"]
    assert finished.split()[:5] == [first.name, "finished", "20/20", "eval/pass@1", "0.4"]
    assert killed.split()[:5] == ["20260101-110000-rloo-exact", "killed", "7/20", "eval/pass@1", "0.2"]
    assert all(len(line) <= 80 for line in result.stdout.splitlines())
    rows = json.loads(rlhf_here("runs", first.parent, "--json").stdout)
    assert [(row["status"], row["step"], row["figure"]) for row in rows] == [("finished", 20, 0.4), ("killed", 7, 0.2)]
    assert rlhf_here("runs", first).stdout.splitlines()[1].split()[0] == first.name


def test_where_there_are_no_runs(rlhf_here, tmp_path):
    result = rlhf_here("runs", tmp_path / "nowhere")
    assert result.exit_code == 2
    assert "no such folder" in result.stderr
    result = rlhf_here("runs", tmp_path)
    assert (result.exit_code, result.stdout) == (0, "")
    assert f"{tmp_path} has no runs" in result.stderr


def test_a_run_is_shown(rlhf_here, make, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    run = make("one", about={"status": "failed", "error": "the judge\x1b[2J is down"})
    result = rlhf_here("show", run)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    words = " ".join(result.stdout.split())
    assert words.startswith(f"{run}: failed at step 20 of 20, begun ")
    assert "error: the judge\\x1b[2J is down" in words
    assert "\x1b" not in result.stdout
    assert "algo rloo; reward exact × 2" in lines
    assert "model models/small" in lines
    assert "draws: 4 trained, 1 dropped: hard" in lines
    titles = [line for line in lines if line in ("eval/pass@1", "reward/mean", "entropy")]
    assert titles == ["eval/pass@1", "reward/mean", "entropy"]
    assert ["reward/mean", "0.23", "0.38", "0.21", "0.4"] in [line.split() for line in lines]
    assert "Warning: step" in result.stdout
    assert "the policy hardly explores any more" in words
    best = lines.index("best answer of step 20 (train): reward 3, 3 tokens")
    assert lines[best + 1 : best + 4] == ["  prompt  3+1=", "  answer  one says 3", "  label   4"]
    assert sum(line.startswith("worst answer") for line in lines) == 2
    assert all(len(line) <= 80 for line in lines)


def test_what_to_plot_may_be_said(rlhf_here, make):
    run = make("one")
    result = rlhf_here("show", run, "--metric", "entropy", "--samples", "0")
    assert "answer of step" not in result.stdout
    plotted = [line for line in result.stdout.splitlines() if line in ("eval/pass@1", "reward/mean", "entropy")]
    assert plotted == ["entropy"]
    result = rlhf_here("show", run, "--metric", "entropi")
    assert result.exit_code == 2
    assert "has no metric 'entropi'" in result.stderr


def test_a_run_that_has_not_begun_to_measure(rlhf_here, make):
    run = make("one", about={"status": "running"})
    for file in ("metrics.jsonl", "ledger.jsonl"):
        (run / file).unlink()
    result = rlhf_here("show", run)
    assert result.exit_code == 0, result.output
    assert "killed at step 0 of 20" in result.stdout


def test_runs_are_compared(rlhf_here, make, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    first = make("first")
    kl = {"reward": {"exact": {"name": "exact", "weight": 1.0}, "len": {"name": "length", "most": 5}}}
    second = make("second", slope=0.03, steps=10, settings={"train": {"steps": 10}} | kl)
    result = rlhf_here("compare", first, second, "--prompts", "1")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    words = [line.split() for line in lines]
    assert ["train.steps", "20", "10"] in words
    assert ["reward.len.name", "-", "length"] in words
    assert ["reward.len.most", "-", "5"] in words, "an option that is not at its default"
    assert not any("clip_eps" in line for line in lines)
    assert ["step", "first", "second"] in words
    assert ["10", "0.3", "0.5"] in words
    assert ["last", "0.4", "0.5"] in words
    limits = [line for line in lines if line.lstrip().startswith("0.5 |")]
    assert limits
    assert all(line.count("0.5 |") == 2 for line in limits), "the same limits"
    assert "prompt (eval, label 1)  0+1=" in lines
    assert lines[-2:] == ["  first, step 20, reward 0: first says 0", "  second, step 10, reward 0: second says 0"]
    assert all(len(line) <= 80 for line in lines)


def test_one_run_has_nothing_beside_it(rlhf_here, make):
    run = make("one")
    result = rlhf_here("compare", run)
    assert result.exit_code == 2
    assert "takes two runs or more" in result.stderr
    result = rlhf_here("compare", run, run)
    assert result.exit_code == 2
    assert "is given twice" in result.stderr


@pytest.mark.parametrize("command", ["runs", "show", "compare"])
def test_the_command_starts_and_ends_by_itself(rlhf_process, make, command):
    run = make("one")
    places = {"runs": [run.parent], "show": [run], "compare": [run, make("two")]}[command]
    done = rlhf_process(command, *places)
    assert "reward/mean" in done.stdout or "eval/pass@1" in done.stdout


DAMAGED = [
    ("metrics.jsonl", '{"step": 3, "kl": 1' + "0" * 400 + "}"),
    ("metrics.jsonl", '{"step": 3, "kl": ' + "[" * 100_000 + "}"),
    ("metrics.jsonl", '{"step": 3, "entropy": null, "time/wall": NaN}'),
    ("metrics.jsonl", '{"step": 3, "entropy": "low", "constructor": 1}'),
    ("metrics.jsonl", '\xff\n{"step": 1'),
    ("ledger.jsonl", '{"step": 1}\n{"step": 2, "draws": [3, []]}'),
    ("plugins.json", '[{"kind": "algo"'),
    ("plugins.json", '{"kind": "algo"}'),
    ("plugins.json", '[{"kind": "algo", "name": "rloo"}, 3]'),
    ("run.json", "[]"),
    ("run.json", '{"status": "finished", "started": "soon", "ended": NaN}'),
    ("config.yaml", ""),
    ("config.yaml", "algo: 3"),
    ("trajectories/eval-step-²3.jsonl", "{}"),
    ("trajectories/train-step-000030.jsonl", '{"reward": NaN, "segments": [{}, {"kind": "action"}]}\n{"reward": 1e400}'),
]


@pytest.mark.parametrize(("file", "content"), DAMAGED)
def test_damaged_files_are_forgiven_or_named(rlhf_here, make, tmp_path, file, content):
    run, whole = make("one"), make("two")
    (run / file).write_text(content)
    page = tmp_path / "page.html"
    for command in (["show", run], ["compare", run, whole], ["report", run, "-o", page], ["runs", run.parent]):
        result = rlhf_here(*command)
        assert result.exception is None or isinstance(result.exception, SystemExit), command
        assert result.exit_code == (2 if file == "config.yaml" and command[0] != "runs" else 0), result.output
        if file == "config.yaml":
            assert "config.yaml has no train" in result.stderr
    assert "two" in rlhf_here("runs", run.parent).stdout, "one damaged run hides no other"
    assert "NaN" not in rlhf_here("report", run, "-o", page).stdout


def test_a_page_replaces_a_page_and_nothing_else(rlhf_here, make, tmp_path):
    run, page = make("one"), tmp_path / "page.html"
    for _ in range(2):
        assert rlhf_here("report", run, "-o", page).exit_code == 0
    before = (run / "config.yaml").read_text()
    done = rlhf_here("report", run, "-o", run / "config.yaml")
    assert done.exit_code == 2
    assert "config.yaml exists, and is no page: remove it, or choose another --output" in done.stderr
    assert (run / "config.yaml").read_text() == before


@pytest.mark.parametrize("command", ["show", "report", "compare"])
def test_without_a_name_the_newest_are_taken(rlhf_here, make, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    done = rlhf_here(command)
    assert done.exit_code == 2
    assert "no run is named, and runs/ has no runs" in done.stderr
    for number, name in enumerate(("newest", "older", "oldest")):  # not in the order of their names or times of change
        make(name, about={"started": 1_700_000_000.0 - number})
    done = rlhf_here(command)
    assert done.exit_code == 0, done.output
    taken = "runs/older and runs/newest are" if command == "compare" else "runs/newest is"
    assert done.stderr.splitlines()[0] == f"no run is named: {taken} the newest"
    if command == "report":
        assert done.stdout.startswith(f"wrote {tmp_path}/report.html (")
    else:
        assert "newest" in done.stdout
        assert "oldest" not in done.stdout


def test_one_run_is_not_enough_to_compare(rlhf_here, make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make("one")
    done = rlhf_here("compare")
    assert done.exit_code == 2
    assert "runs/ has only the run one" in done.stderr


def test_a_note_is_shown_everywhere_and_removed(rlhf_here, make):
    run, other = make("one"), make("two")
    assert "note" not in rlhf_here("runs", run.parent).stdout
    assert rlhf_here("runs", "--note", run, "a [control]").stdout == f"{run}/note.txt: written\n"
    table = rlhf_here("runs", run.parent).stdout.splitlines()
    assert table[0].endswith("note")
    assert table[1].endswith("a [control]")
    assert "\nnote: a [control]\n" in rlhf_here("show", run).stdout
    assert ["note", "a", "[control]"] in [line.split() for line in rlhf_here("compare", run, other).stdout.splitlines()]
    assert rlhf_here("runs", "--note", run, "").stdout == f"{run}/note.txt: removed\n"
    assert "note" not in rlhf_here("runs", run.parent).stdout


def test_best_and_worst_only_where_rewards_differ(rlhf_here, make):
    run = make("one")
    file = run / "trajectories/train-step-000020.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    shown = rlhf_here("show", run).stdout
    assert shown.count("best answer of step 20") == shown.count("worst answer of step 20") == 2
    file.write_text("".join(json.dumps(row | {"reward": 1.0}) + "\n" for row in rows))
    shown = rlhf_here("show", run).stdout
    assert "worst answer of step 20 (eval): reward 0" in shown, "it is looked for in the last evaluation"
    (run / "trajectories/eval-step-000020.jsonl").unlink()
    shown = rlhf_here("show", run).stdout
    assert "All 4 answers of step 20 (train) that were saved have the same reward, 1:" in shown
    assert shown.count("\nanswer of step 20 (train): reward 1") == 2
    assert "best answer" not in shown
    assert "worst answer" not in shown
    file.write_text("".join(json.dumps(row | {"reward": float(row["task"] == 3)}) + "\n" for row in rows))
    shown = rlhf_here("show", run).stdout
    found = [line.partition(":")[0::2] for line in shown.splitlines() if "answer of step" in line]
    assert found == [
        ("best answer of step 20 (train)", " reward 1, 3 tokens"),
        ("worst answer of step 20 (train)", " reward 0, 3 tokens"),
        ("worst answer of step 20 (train)", " reward 0, 3 tokens"),
    ]


@pytest.mark.parametrize("columns", [80, 44, 24])
def test_no_word_of_a_table_is_broken(rlhf_here, make, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    runs = [make(f"20260101-100000-{name}") for name in ("rloo-exact", "grpo-exact")]
    rlhf_here("runs", "--note", runs[0], "unremarkable beginnings")
    for words in (["runs", runs[0].parent], ["compare", *runs, "--prompts", "0"]):
        done = rlhf_here(*words)
        table = done.stdout.partition("\n\neval/pass@1\n")[0]
        assert all(len(line) <= columns for line in table.splitlines()), table
        assert {"finished", "unremarkable", "beginnings"} <= {*table.split()}, table


def test_failed_episodes_and_the_interval_are_beside_the_figure_everywhere(rlhf_here, make, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    lossy = make("lossy", evaluated={"eval/pass@1/stderr": 0.05, "eval/failed": 550.0, "eval/failed/share": 0.366})
    plain = make("plain")
    said = "0.4 ± 0.098 (95 %); 36.6 % of the episodes failed and count as wrong"
    listed = rlhf_here("runs", lossy.parent).stdout
    assert f"eval/pass@1 {said}" in listed
    assert [row["failed"] for row in json.loads(rlhf_here("runs", lossy.parent, "--json").stdout)] == [0.366, 0.0]
    assert f"eval/pass@1 at the end: {said}" in rlhf_here("show", lossy).stdout.splitlines()
    beside = [line.split() for line in rlhf_here("compare", plain, lossy, "--metric", "eval/pass@1").stdout.splitlines()]
    assert ["last", "0.4", "0.4", "±", "0.098", "(95", "%)"] in beside
    assert ["of", "which", "-", "36.6", "%", "of", "the", "episodes", "failed", "and", "count", "as", "wrong"] in beside
    head = Shown(RunDirectory(lossy), "lossy").head()
    assert (head["headline"], head["beside"]) == ("eval/pass@1", said.partition("; ")[2])


def test_runs_of_different_lengths_have_one_axis(rlhf_here, make, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    result = rlhf_here("compare", make("short", steps=10), make("long", steps=20), "--metric", "eval/pass@1")
    [axis] = [line.split() for line in result.stdout.splitlines() if line.split()[:2] == ["step", "0"]]
    assert axis == ["step", "0", "20", "step", "0", "20"]
