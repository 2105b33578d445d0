"""``rlhf runs``, ``show`` and ``compare``, on made-up run directories."""

from __future__ import annotations

import json

import pytest


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
