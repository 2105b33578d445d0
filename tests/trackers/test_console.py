"""What a person sees: a line per step, samples that cannot steer the terminal, warnings, and a bar on a real terminal."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.text import Text

from rlhf_host.records.episodes import Segment
from rlhf_host.records.needs import Outcome
from rlhf_host.trackers.console import Console

STEP = {
    "reward/mean": 0.5,
    "reward/std": 0.25,
    "score/mean": 0.625,
    "kl": 0.012,
    "entropy": 1.5,
    "clip_fraction": 0.031,
    "loss": -0.02,
    "grad_norm": 0.75,
    "lr": 1e-5,
    "mismatch/mean": 2.4e-7,
    "length/mean": 12.5,
    "tokens_per_s": 12345.6,
    "time/step": 1.234,
}


@pytest.fixture
def started(context, capsys):
    def start(resume_step=None, **options) -> Console:
        tracker = Console(Console.Options(**options))
        tracker.run_started(context(resume_step, train={"steps": 120}, trajectories={"show": 2}))
        capsys.readouterr()
        return tracker

    return start


def test_a_step_is_one_plain_line_when_output_is_not_a_terminal(started, capsys):
    started().log_metrics(7, STEP)
    assert capsys.readouterr().out == (
        "step   7/120  reward 0.500 std 0.250  kl 0.012  length 12.5  entropy 1.500  s/step 1.23  grad 0.75  score 0.625"
        "  clip 3.1%  loss -0.02  lr 1e-05  mismatch 2.4e-07  tok/s 12,346\n"
    )


def test_fast_steps_have_a_line_in_a_while_if_output_is_not_a_terminal(started, capsys, monkeypatch):
    def steps(tracker, seconds):
        now = 0.0
        for step in range(1, 121):
            now += seconds
            monkeypatch.setattr("time.monotonic", lambda now=now: now)
            tracker.log_metrics(step, {"reward/mean": 0.5} | ({"eval/pass@1": 0.5} if step == 9 else {}))
        return [int(step) for step in re.findall(r"^step +(\d+)/", capsys.readouterr().out, re.M)]

    assert steps(started(), 0.5) == [1, 9, *range(19, 120, 10), 120]
    assert steps(started(), 5.0) == list(range(1, 121))
    assert steps(started(seconds=0), 0.5) == list(range(1, 121))


def test_an_evaluation_has_a_line_of_its_own(started, capsys):
    started().log_metrics(10, {"eval/reward": 0.5, "eval/pass@1": 0.25})
    assert capsys.readouterr().out == "eval after step 10  pass@1 0.250  reward 0.500\n"


def test_failed_episodes_are_said_beside_the_figures(started, capsys):
    tracker = started()
    tracker.log_metrics(10, {"eval/pass@1": 0.25, "eval/pass@1/stderr": 0.1, "eval/failed/share": 0.5})
    assert capsys.readouterr().out == (
        "eval after step 10  pass@1 0.250 ± 0.2 (95 %)  failed/share 0.500\n"
        "  pass@1: 50 % of the episodes failed and count as wrong\n"
    )
    tracker.log_metrics(11, {"reward/mean": 1.0, "rollout/failed": 1.0, "rollout/finished": 2.0, "rollout/truncated": 1.0})
    assert capsys.readouterr().out == "step  11/120  reward 1.000  failed 25.0%\n"


def test_absent_metrics_are_left_out(started, capsys):
    started().log_metrics(1, {"loss": 0.5, "something/else": 3})
    assert capsys.readouterr().out == "step   1/120  loss 0.5\n"


def test_samples_show_prompt_completion_label_and_reward(started, trajectory, capsys):
    started().log_trajectories(1, "train", [trajectory("2+3=", "5\nyes", sample=i, reward=0.5) for i in range(6)])
    line = "  train sample: prompt='2+3=' completion='5\\nyes' label='5' reward=0.5"
    assert capsys.readouterr().out.splitlines() == [line, line]


def test_samples_show_special_tokens(context, trajectory, capsys):
    """What the model saw and wrote: whether a chat template was used, and whether it ended its turn."""

    class Tokenizer:
        def decode(self, ids, skip_special_tokens=True):
            return "".join("" if skip_special_tokens and i > 255 else "<|end|>" if i > 255 else chr(i) for i in ids)

    tracker = Console(Console.Options())
    tracker.run_started(replace(context(None, trajectories={"show": 1}), tokenizer=Tokenizer()))
    row = trajectory("2+3=", "5")
    row.segments = [Segment("prompt", [256, 63]), Segment("action", [53, 10, 256])]
    capsys.readouterr()
    tracker.log_trajectories(1, "train", [row])
    assert "prompt='<|end|>?' completion='5\\n<|end|>' label" in capsys.readouterr().out


@pytest.fixture
def terminal(context, monkeypatch, capsys):
    """A tracker on a terminal of 80 columns, and its clock."""
    now = [0.0]
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("rich.console.monotonic", lambda: now[0])
    tracker = Console(Console.Options())
    tracker.run_started(context(None, train={"steps": 1200}))
    tracker._progress.live.stop()
    capsys.readouterr()
    return tracker, now


def test_a_line_fits_a_terminal_of_80_columns(terminal, capsys):
    tracker, _ = terminal
    tracker.log_metrics(7, STEP)
    tracker.log_metrics(8, {"reward/mean": -12.5, "reward/std": 10.25, "kl": 0.00123, "entropy": 0.5, "length/mean": 1234.5})
    tracker.log_metrics(9, {f"eval/{name}": 0.5 for name in ("failed", "pass@1", "pass@8", *STEP)})
    lines = [Text.from_ansi(line).plain for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 3, lines
    assert max(map(len, lines)) <= 80
    assert " ".join(lines[0].split()) == "step 7/1200 reward 0.500 std 0.250 kl 0.012 length 12.5 entropy 1.500"
    assert lines[1].index("length") - lines[0].index("length") == len("-12.500 std 10.250") - len("0.500 std 0.250"), (
        "the numbers stand in columns"
    )
    assert lines[2].startswith("eval after step 9  pass@1 0.500  pass@8 0.500  reward/mean 0.500")


def test_the_time_that_is_left_is_shown_for_slow_steps_too(terminal):
    tracker, now = terminal
    for step in (1, 2, 3):
        now[0] += 90.0
        tracker.log_metrics(step, STEP)
    assert tracker._progress.tasks[0].time_remaining == pytest.approx(1197 * 90, rel=0.01)


def test_samples_come_every_so_often_and_at_each_evaluation(started, trajectory, capsys):
    tracker = started(every=5)
    seen = []
    for step in range(1, 11):
        tracker.log_trajectories(step, "train", [trajectory()])
        seen += [step] * bool(capsys.readouterr().out)
    assert seen == [1, 5, 10]
    tracker.log_trajectories(3, "eval", [trajectory()])
    assert "eval sample" in capsys.readouterr().out


def test_long_texts_keep_their_beginning_and_their_end(started, trajectory, capsys):
    started(width=25).log_trajectories(1, "train", [trajectory(text="A" * 50 + "B" * 50)])
    assert f"'{'A' * 10} ... {'B' * 10}'" in capsys.readouterr().out


def test_trouble_is_said_once_and_again_only_later(started, capsys):
    tracker = started()
    trouble = {"reward/mean": 1.0, "groups/no_variance": 1.0, "loss": float("nan"), "rollout/failed": 3}
    tracker.log_metrics(1, trouble)
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert warnings == [
        "warning: step 1: not finite: loss",
        "warning: step 1: in every group all rewards are the same: this batch has nothing to teach",
    ]
    tracker.log_metrics(2, trouble)
    assert "warning" not in capsys.readouterr().out
    tracker.log_metrics(21, trouble)
    assert capsys.readouterr().out.count("warning") == 2


def test_odd_values_do_not_stop_a_run(started, odd_metrics, odd_trajectories, capsys):
    tracker = started()
    tracker.log_metrics(1, {**odd_metrics, **{name: float("nan") for name in STEP}, "eval/[/]": 1})
    tracker.log_trajectories(1, "train", odd_trajectories)
    tracker.log_trajectories(1, "eval", [])
    tracker.run_finished(Outcome("failed", 1, error="[/red] \x1b]0;title\x07"))
    out = capsys.readouterr().out
    assert not set(out) & {"\x1b", "\x07", "\x00", "\x9b", "\u202e", "\ud800", "\u2028"}
    assert "[bold red]hi[/bold red] [/nonsense]" in out
    assert "failed after step 1: [/red] \\x1b]0;title\\x07\n" in out


def test_a_log_in_an_old_encoding_gets_escapes():
    code = """
from rlhf_host.trackers.console import Console
from rlhf_host.records.needs import Outcome
tracker = Console(Console.Options())
tracker.log_metrics(1, {"reward/mean": 1.0, "reward/std": 0.5})
tracker.run_finished(Outcome("failed", 1, error="né ✓"))
"""
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"}, cwd=ROOT
    )
    assert found.stdout == b"step 1  reward 1.000 std 0.500\nfailed after step 1: n\\xe9 \\u2713\n", found.stderr.decode()


ROOT = Path(__file__).resolve().parents[2]

ON_TERMINAL = """
import sys
sys.path.insert(0, {here!r})
from rlhf_host.trackers.console import Console
from rlhf_host.records.episodes import Segment, Task, Trajectory
from rlhf_host.records.needs import Outcome, RunContext

tracker = Console(Console.Options())
tracker.run_started(RunContext({{}}, None, None, 0, {{}}, steps=4))
nasty = "\\x1b[2J\\x07[bold red]hi[/bold red] [/nonsense]"
segments = [Segment("prompt", [0]), Segment("action", [1])]
tracker.log_metrics(1, {{"reward/mean": 0.5, "reward/std": 0.25}})
tracker.log_trajectories(1, "train", [Trajectory("e", "g", Task("p", "42"), segments, reward=0.5, decode=lambda ids: nasty)])
tracker.log_metrics(2, {{"reward/mean": 0.5}})
tracker._progress.refresh()
tracker.run_finished(Outcome("finished", 2))
"""


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo-terminal")
def test_a_terminal_gets_a_bar_with_eta_and_a_table_that_model_text_cannot_leave():
    outer, inner = os.openpty()
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
    env.pop("NO_COLOR", None)
    code = ON_TERMINAL.format(here=str(ROOT))
    with subprocess.Popen([sys.executable, "-c", code], stdout=inner, stderr=inner, env=env) as process:
        os.close(inner)
        seen = b""
        while True:
            try:
                part = os.read(outer, 65536)
            except OSError:  # Linux says so when the other end is closed
                break
            if not part:
                break
            seen += part
    os.close(outer)
    assert process.returncode == 0, seen.decode()
    assert b"2/4" in seen
    assert b"ETA" in seen
    assert b"train samples, step 1" in seen
    assert b"\\x1b[2J\\x07[bold red]hi[/bold red] [/nonsense]" in seen
    assert b"\x1b[2J" not in seen
    assert b"\x07" not in seen
    assert seen.rstrip().endswith(b"\x1b[32mfinished after step 2\x1b[0m")
