"""Sweeps: what is refused before anything runs, what goes on, what counts, and the page; runs are made up where none must train."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import rlhf_sweep.commands.sweep
from click.testing import CliRunner
from rlhf_sweep import execute
from rlhf_sweep.folder import VERSION

from rlhf_host import RunDirectory
from rlhf_host.commands import main
from rlhf_host.settings import plain, read_yaml

for each in ("rloo", "grpo", "math_verifier"):
    pytest.importorskip(f"rlhf_plugin_{each}")

ROWS = [{"prompt": f"{i}+{7 * i % 100}=", "label": str(i + 7 * i % 100)} for i in range(16)]
BASE = ["--model", "quickstart", "--data", "t.jsonl", "--reward", "math_verifier", "--steps", "8", "--batch-size", "4"]
BASE += ["--n", "2", "--train.threads", "1", "--checkpoint.every", "2"]
GRID = ["--vary.algo", "rloo,grpo", "--lr", "1e-4", "--seeds", "0..2"]
REWARDS = {"rloo": 0.5, "grpo": 0.2}


class Made:
    """Executes nothing: writes what a run would leave."""

    at_once = 1
    fails: tuple[str, ...] = ()
    stops_at: int | None = None

    def __init__(self, at_once):
        self.started = []

    def start(self, run, words, log):
        if self.stops_at == len(self.started):
            raise KeyboardInterrupt
        self.started.append(run.name)
        STARTED.append((run.name, words[1]))
        made = Path(read_yaml(words[-1]).value["run_dir"].value) if words[1] == "--config" else Path(words[-1])
        made.mkdir(parents=True, exist_ok=True)
        if words[1] == "--config":
            shutil.copy(words[-1], made / "config.yaml")
        log.parent.mkdir(exist_ok=True)
        failed = run.name in self.fails
        log.write_text("Error: no luck\n" if failed else "")
        about = {"status": "failed", "error": "no luck"} if failed else {"status": "finished"}
        (made / "run.json").write_text(json.dumps(about | {"steps": 8, "started": 1.0}))
        (made / "plugins.json").write_text("[]")
        high = REWARDS[run.config.algo.name] + 0.01 * (run.seed or 0)
        rows = [{"step": step, "reward/mean": high if step > 6 else 0.9} for step in range(1, 9)]
        (made / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return Ended(1 if failed else 0)

    def has_room(self, run):
        return True

    def close(self):
        pass


class Ended:
    def __init__(self, code):
        self.code = code

    def poll(self):
        return self.code

    def interrupt(self): ...
    def kill(self): ...


STARTED: list[tuple[str, str]] = []


@pytest.fixture
def sweep(monkeypatch, tmp_path):
    """``rlhf sweep`` in this process, with made-up runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(rlhf_sweep.commands.sweep, "Here", Made)
    monkeypatch.setattr("rlhf_sweep.execute.POLL_S", 0.0)
    monkeypatch.setattr(Made, "fails", ())
    monkeypatch.setattr(Made, "stops_at", None)
    STARTED.clear()
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return lambda *words: CliRunner().invoke(main, ["sweep", *map(str, words)])


def test_runs_are_made_once_compared_and_shown(sweep, tmp_path):
    done = sweep(*BASE, *GRID, "-o", "s")
    assert done.exit_code == 0, done.output
    assert len(STARTED) == 6
    assert "By reward/mean (mean over the last quarter of the steps; higher is better)" in done.output
    assert "0.51 ± 0.0058" in done.output  # not 0.9, which most steps had
    assert "Best: algo rloo: 0.51 ± 0.0058 over 3 seeds" in done.output
    page = (tmp_path / "s/report.html").read_text()
    assert "http://" not in page.replace("http://www.w3.org", "")
    again = sweep(*BASE, *GRID, "-o", "s", "--json")
    assert len(STARTED) == 6
    found = json.loads(again.stdout)
    assert [row["finished"] for row in found["settings"]] == [3] * 2
    assert found["settings"][0]["stderr"] == pytest.approx(0.01 / 3**0.5)
    more = sweep(*BASE, *GRID[:-1], "0..3", "-o", "s")
    assert more.exit_code == 0, more.output
    assert len(STARTED) == 8


def test_a_file_and_a_command_line_give_the_same_runs(sweep, tmp_path):
    (tmp_path / "s.yaml").write_text(
        "settings:\n  actor: {model: quickstart}\n  data: t.jsonl\n  reward: math_verifier\n"
        "  train: {steps: 9, batch_size: 4, threads: 1}\n"
        "  rollout: {n: 2}\n  checkpoint: {every: 2}\nvary:\n  actor.lr: [1e-4, 1e-3]\n  algo: [rloo, {name: grpo}]\n"
    )
    assert sweep("s.yaml", "--steps", "8", "-o", "a").exit_code == 0
    assert sweep(*BASE, "--vary.lr", "0.0001,1e-3", "--vary.algo", "rloo,grpo", "-o", "b").exit_code == 0
    first, second = (json.loads((tmp_path / name / "sweep.json").read_text())["runs"] for name in "ab")
    assert first == second
    assert len(first) == 4
    other = sweep("s.yaml", "--steps", "8", "--vary.lr", "1e-5,1e-4", "--dry-run")
    assert other.output.count("lr-1e-05") == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "that is one run"),
        (["--vary.actor.lrr", "1,2"], "--actor.lrr: no such flag; did you mean '--actor.lr'"),
        (["--vary.lr", "1e-3,1e-4", "--lr", "1e-3"], "--lr is set, and --vary.lr varies it"),
        (["--vary.lr", "1e-3,1e-4", "--vary.actor.lr", "1,2"], "vary the same"),
        (["--vary.lr", "1..1000", "--vary.seed", "1,2"], "seeds are given as --seeds"),
        (
            ["--vary.lr", "1e-6..1:log:9999", "--vary.temp", "0..1:lin:99999", "--seeds", "0..99"],
            "runs of 999,890,001 combinations are more",
        ),
        (["--vary.lr", "1e-6..1:log"], "has no number of values"),
        (["--vary.lr", "1,2", "--trials", "2"], "add --sampler random"),
        (["--vary.lr", "1,2", "--sampler", "random", "--trials", "3"], "only 2 combinations"),
        (["--vary.lr", "1,2", "--sampler", "rndom", "--trials", "3"], "did you mean 'random'"),
        (["--vary.lr", "1,2", "--run-dir", "x"], "--output names that of the sweep"),
        (["--vary.lr", "1,2", "--on", "slurm"], "local or ray"),
        (["--vary.train.minibatches", "1,null,x"], "in 1 of 3 combinations, such as train.minibatches x"),
        (["--vary.reward", 'math_verifier,{"math_verifier": {"name": "math_verifier"}}'], "--reward is set"),
        (["--vary.kernels", 'none,{"name": "none"}'], "none is there twice"),
        (["--vary.lr", "1,2", "-o", "t.jsonl"], "is a file"),
        (["--vary.lr", "1,2", "-o", "."], "has other files, such as t.jsonl"),
    ],
)
def test_nothing_is_written_where_something_is_wrong(sweep, tmp_path, words, said):
    done = sweep(*BASE, "--algo", "rloo", *words)
    assert done.exit_code == 2, done.output
    assert said in done.output
    assert [path.name for path in tmp_path.iterdir()] == ["t.jsonl"]


GRPO = '{"name":"grpo","clip_eps":%s}'


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--algo.clip_eps", "0.4", f"--vary.algo={GRPO % 0.1},{GRPO % 0.2}"],
            "--vary.algo[clip_eps] is overridden by --algo.clip_eps: leave one out",
        ),
        (
            [f"--vary.algo=rloo,{GRPO % 0.1}", "--vary.algo.clip-eps", "0.3,0.4"],
            "--vary.algo[clip_eps] is overridden by --vary.algo.clip-eps: leave one out (in 2 of",
        ),
        (
            ["--algo", "rloo", "--lr", "1e-3", '--vary.roles.actor={"lr":1e-5},{"lr":1e-4}'],
            "--vary.roles.actor[lr] is overridden by --lr: leave one out",
        ),
        (
            ["--algo", "rloo", "--actor.lora-rank", "8", '--vary.actor={"lora":{"rank":2}},{"lora":{"rank":4}}'],
            "--vary.actor[lora][rank] is overridden by --actor.lora-rank: leave one out",
        ),
        (
            ["--algo", "rloo", "--actor.lora-rank", "8", '--vary.actor={"lora":null},{"lora":{"alpha":4}}'],
            "--vary.actor[lora] is overridden by --actor.lora-rank: leave one out",
        ),
        (["s.yaml", "--algo.clip-eps", "0.4"], "s.yaml:1: vary.algo[clip_eps] is overridden by --algo.clip-eps: leave one out"),
    ],
)
def test_a_value_of_an_alternative_that_would_not_count_is_refused(sweep, tmp_path, words, said):
    (tmp_path / "s.yaml").write_text(f"vary: {{algo: [{GRPO % 0.1}, {GRPO % 0.2}]}}".replace(":", ": "))
    done = sweep(*words[:1], *BASE, *words[1:]) if words[0] == "s.yaml" else sweep(*BASE, *words)
    assert done.exit_code == 2, done.output
    assert said in done.output


def test_runs_have_the_values_of_their_alternatives(sweep, tmp_path):
    (tmp_path / "s.yaml").write_text(f"settings: {{algo: {{name: grpo, clip_eps: 0.4}}}}\nvary: {{algo: [{GRPO % 0.1}, rloo]}}")
    done = sweep("s.yaml", *BASE, "-o", "s")
    assert done.exit_code == 0, done.output
    configs = [plain(read_yaml(path))["algo"] for path in sorted(tmp_path.glob("s/runs/*/config.yaml"))]
    assert [(each["name"], each.get("clip_eps")) for each in configs] == [("grpo", 0.1), ("rloo", 0.2)]


def test_an_alternative_may_be_empty(sweep):
    lora, extension = '--vary.actor={"lora":null},{"lora":{"rank":4}}', '--vary.with=[],[{"name":"kl","coef":0.1}]'
    done = sweep(*BASE, "--algo", "rloo", lora, extension, "--dry-run")
    assert done.exit_code == 0, done.output


def test_all_mistakes_are_told_at_once(sweep):
    done = sweep(*BASE, "--vary.algo", "rloo,grpoo", "--vary.actor.lr", "1,x")
    assert done.exit_code == 2
    assert "grpoo" in done.output
    assert "--actor.lr" in done.output


def test_a_file_is_read_strictly(sweep, tmp_path):
    for text, said in (
        ("varry: {}", "s.yaml:1: varry: no such key; did you mean 'vary'"),
        ("train: {steps: 3}", "settings of the runs go below 'settings:'"),
        ("vary: {actor.lr: 3}", "s.yaml:1: vary.actor.lr: give a list"),
        ("vary: [a]", "should be a mapping"),
        ("seeds: [0, 0]", "seed 0 is there twice"),
        ("seeds: true", "should be a number or a word"),
    ):
        (tmp_path / "s.yaml").write_text(text)
        done = sweep("s.yaml", *BASE, "--algo", "rloo")
        assert done.exit_code == 2
        assert said in done.output


def test_a_failed_run_ends_nothing_and_counts_nowhere(sweep, monkeypatch):
    monkeypatch.setattr(Made, "fails", ("lr-0.0001_seed-1",))
    words = [*BASE, "--algo", "rloo", "--vary.lr", "1e-4,1e-3", "--seeds", "0,1", "-o", "s"]
    done = sweep(*words)
    assert done.exit_code == 1
    assert "1 of 4 runs failed: lr-0.0001_seed-1" in done.output
    assert "1 of 2, 1 failed" in done.output
    assert "Best: actor.lr 0.001" in done.output  # the other lacks a seed
    assert "no luck" in done.output
    assert sweep(*words).exit_code == 1
    assert len(STARTED) == 4
    monkeypatch.setattr(Made, "fails", ())
    done = sweep(*words, "--failed", "retry")
    assert done.exit_code == 0, done.output
    assert STARTED[4:] == [("lr-0.0001_seed-1", "--resume")]


def test_an_interrupted_sweep_says_the_command_that_goes_on(sweep, monkeypatch):
    monkeypatch.setattr(Made, "stops_at", 2)
    words = [*BASE, "--algo", "rloo", "--vary.lr", "1e-4,1e-3", "--seeds", "0,1", "-o", "my sweep"]
    done = sweep(*words)
    assert done.exit_code == 130
    assert "sweep --seeds 0,1 --output 'my sweep' --model quickstart" in done.output
    monkeypatch.setattr(Made, "stops_at", None)
    assert sweep(*words).exit_code == 0
    assert len(STARTED) == 4


def test_a_folder_has_one_sweep_and_is_not_edited(sweep, tmp_path):
    words = [*BASE, "--algo", "rloo", "--vary.lr", "1e-4,1e-3", "-o", "s"]
    assert sweep(*words).exit_code == 0
    other = sweep(*words, "--max-new-tokens", "9")
    assert other.exit_code == 2
    assert "s has a sweep with other settings: lr-0.0001_seed-0 differs in rollout.max_new_tokens" in other.output
    fewer = sweep(*BASE, "--algo", "rloo", "--vary.lr", "1e-4,1e-2", "-o", "s")
    assert "lr-0.001_seed-0 is no run of it now" in fewer.output
    run = tmp_path / "s/runs/lr-0.001_seed-0"
    metrics = run / "metrics.jsonl"
    kept = metrics.read_text()
    metrics.write_text(kept.replace("0.5", "0.7"))
    assert "was changed after the run had finished" in sweep(*words).output
    metrics.write_text(kept)
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("max_new_tokens: 256", "max_new_tokens: 16").replace("n: 2", "n: 4"))
    edited = sweep(*words)
    assert edited.exit_code == 2
    assert "was changed since the sweep wrote it (rollout" in edited.output
    shutil.rmtree(run)
    assert sweep(*words).exit_code == 0
    assert len(STARTED) == 3


def test_two_sweeps_in_one_folder_are_refused(sweep):
    from rlhf_sweep.folder import Folder

    with Folder(Path("s")).locked():
        done = sweep(*BASE, "--algo", "rloo", "--vary.lr", "1e-4,1e-3", "-o", "s")
    assert done.exit_code == 2
    assert f"another sweep works in s (process {os.getpid()}" in done.output


def test_a_folder_that_cannot_be_written_is_named(sweep):
    done = sweep(*BASE, "--algo", "rloo", "--vary.lr", "1e-4,1e-3", "-o", "/proc/s")
    assert done.exit_code != 0
    assert "Error: /proc/s" in done.output


def test_results_are_shown_also_where_the_page_cannot_be_written(sweep, tmp_path):
    (tmp_path / "s/report.html").mkdir(parents=True)
    record = {"version": VERSION, "cwd": str(tmp_path), "about": {}, "runs": {}}
    (tmp_path / "s/sweep.json").write_text(json.dumps(record))
    done = sweep(*BASE, "--algo", "rloo", "--vary.lr", "1e-4,1e-3", "-o", "s")
    assert done.exit_code != 0
    assert "By reward/mean" in done.output.partition("Error: s/report.html")[0], done.output


def test_random_draws_are_the_same_again(sweep):
    words = [
        *BASE,
        "--vary.algo",
        "rloo,grpo",
        "--vary.lr",
        "1e-6..1e-3:log",
        "--sampler",
        "random",
        "--trials",
        "4",
        "--dry-run",
    ]
    first = sweep(*words)
    assert first.exit_code == 0
    assert sweep(*words).output == first.output
    assert sweep(*words, "--sampler-seed", "1").output != first.output


def test_a_sampler_of_optuna_goes_on_with_the_same_proposals(sweep, monkeypatch, tmp_path):
    pytest.importorskip("optuna")
    words = [*BASE, "--vary.algo", "rloo,grpo", "--vary.lr", "1e-6..1e-3:log", "--sampler", "tpe", "--trials", "6", "-o"]
    assert sweep(*words, "whole").exit_code == 0
    monkeypatch.setattr(Made, "stops_at", 3)
    assert sweep(*words, "s").exit_code == 130
    monkeypatch.setattr(Made, "stops_at", None)
    assert sweep(*words, "s").exit_code == 0
    whole, stopped = (tmp_path / name / "trials.jsonl" for name in ("whole", "s"))
    assert whole.read_text() == stopped.read_text()
    assert len(STARTED) == 12


def test_a_second_interrupt_is_the_runs_second_one_and_what_goes_on_is_killed(monkeypatch):
    asked = []

    class Stubborn(Ended):
        def poll(self):
            return self.code if "kill" in asked else None

        def interrupt(self):
            asked.append("interrupt")

        def kill(self):
            asked.append("kill")

    def second(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(execute, "AT_ONCE_S", 0.0)
    monkeypatch.setattr(execute, "time", SimpleNamespace(sleep=second, monotonic=time.monotonic))
    execute._end([execute._Running(None, Stubborn(-9), 0.0)], lambda text: None)
    assert asked == ["interrupt", "interrupt", "kill"]


SUPERVISED = """
import os, signal, sys, time
from pathlib import Path
import rlhf_host.commands
from rlhf_supervisor import supervised, supervisor
from rlhf_sweep import one_run

def run(words, prog_name):
    supervisor.FIRST_S, supervisor.LOOK_S = 0.01, 0.01
    supervised("run", restarts=1)
    if not Path("died").exists():
        Path("died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    Path("ready").touch()
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        Path("saved").touch()
        sys.exit(130)

rlhf_host.commands.main = run
one_run.main()
"""


def test_a_run_with_restarts_begins_again_and_ends_with_the_sweep(tmp_path):
    pytest.importorskip("rlhf_supervisor")
    ends, alive = os.pipe()
    run = subprocess.Popen([sys.executable, "-c", SUPERVISED, str(ends)], cwd=tmp_path, pass_fds=[ends], start_new_session=True)
    os.close(ends)
    deadline = time.monotonic() + 60
    while not (tmp_path / "ready").exists() and run.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    os.close(alive)
    assert run.wait(60) == 130
    assert (tmp_path / "died").exists()
    assert (tmp_path / "saved").exists()


def real(words, folder):
    return subprocess.Popen(
        [sys.executable, "-m", "rlhf_host", "sweep", *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def metrics(run):
    """Returns the metrics that are no measurement of time or memory."""
    clocks = ("tflops", "tokens_per_s", "memory/rss_gb")
    return [
        {name: value for name, value in row.items() if not name.startswith("time/") and name not in clocks}
        for row in RunDirectory(run).metrics
    ]


KILLED = [*BASE, "--algo", "rloo", "--vary.lr", "1e-4,1e-3", "-o"]


def test_a_killed_sweep_goes_on_to_the_same_metrics(tmp_path):
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    whole = real([*KILLED, "whole"], tmp_path)
    assert whole.communicate()[0]
    assert whole.returncode == 0
    first = real([*KILLED, "s"], tmp_path)
    run = tmp_path / "s/runs/lr-0.0001_seed-0"
    deadline = time.monotonic() + 300
    while not (run / "checkpoints/step-000004").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    again = real([*KILLED, "s"], tmp_path)
    said = again.communicate()[0]
    assert again.returncode == 0, said
    for name in ("lr-0.0001_seed-0", "lr-0.001_seed-0"):
        assert metrics(tmp_path / "s/runs" / name) == metrics(tmp_path / "whole/runs" / name)
        assert plain(read_yaml(tmp_path / "s/runs" / name / "config.yaml"))["train"]["steps"] == 8


def test_tasks_of_ray_have_the_metrics_of_processes(tmp_path):
    pytest.importorskip("ray")
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for words in (["here"], ["tasks", "--on", "ray"]):
        done = real([*KILLED, *words], tmp_path)
        said = done.communicate()[0]
        assert done.returncode == 0, said
    for name in ("lr-0.0001_seed-0", "lr-0.001_seed-0"):
        assert metrics(tmp_path / "tasks/runs" / name) == metrics(tmp_path / "here/runs" / name)
