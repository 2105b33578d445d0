"""A run over a data set that is killed at any moment, and resumed, gives the values of the run that never was: every data kind."""

from __future__ import annotations

import json
import random
import signal
import time

import pytest

STEPS = 24
KINDS = {"prompt_completion": "sft", "preference": "dpo", "unpaired": "kto"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """kind → a file, with rows of ragged lengths."""
    folder = tmp_path_factory.mktemp("data")
    pairs = [
        {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a * b + 11)} for a in range(2, 9) for b in range(3, 8)
    ]
    single = [{"prompt": row["prompt"], "completion": row["chosen" if n % 3 else "rejected"]} for n, row in enumerate(pairs)]
    rows = {
        "prompt_completion": single,
        "preference": pairs,
        "unpaired": [{**row, "label": bool(number % 3)} for number, row in enumerate(single)],
    }
    for kind, each in rows.items():
        (folder / f"{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in each))
    return {kind: folder / f"{kind}.jsonl" for kind in rows}


@pytest.fixture
def flags(data, tiny_model):
    def make(kind):
        files = ["--data", data[kind], "--eval.data", data[kind], "--actor.model", tiny_model]
        numbers = ["--train.batch-size", "4", "--train.steps", str(STEPS), "--eval.every", "5", "--checkpoint.every", "3"]
        return [
            "train",
            "--algo",
            KINDS[kind],
            *files,
            *numbers,
            "--actor.lr",
            "1e-3",
            "--train.threads",
            "1",
            "--kernels",
            "none",
        ]

    return make


def curve(run_dir):
    machine = ("time/", "memory/", "engine/", "sync/", "tokens_per_s", "tflops", "mfu")
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith(machine)} for row in rows]


def wait_for(condition, process, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("kind", KINDS)
def test_kill_9_at_random_moments_changes_nothing(rlhf, flags, tmp_path, kind):
    """Some time after a row of metrics that is drawn too: in a step, an evaluation, or a checkpoint that is written."""
    rlhf.run(*flags(kind), "--run-dir", tmp_path / "whole")
    run_dir, draw = tmp_path / "run", random.Random(kind)
    metrics = run_dir / "metrics.jsonl"

    def rows():
        return metrics.read_text().count("\n") if metrics.exists() else 0

    process, killed = rlhf.start(*flags(kind), "--run-dir", run_dir), 0
    for moment in sorted(draw.sample(range(1, STEPS), 4)):
        wait_for(lambda moment=moment: rows() >= moment, process)
        time.sleep(draw.uniform(0.0, 0.05))
        process.send_signal(signal.SIGKILL)
        killed += process.wait(60) == -signal.SIGKILL
        process.communicate()
        process = rlhf.start("train", "--resume", run_dir)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, out + err
    assert killed >= 3
    assert curve(run_dir) == curve(tmp_path / "whole")


def test_a_resume_with_a_changed_row_is_refused(rlhf_here, flags, data, tmp_path):
    file = tmp_path / "pairs.jsonl"
    file.write_text(data["preference"].read_text())
    own = [file if part == data["preference"] else part for part in flags("preference")]
    assert rlhf_here(*own, "--train.steps", "2", "--run-dir", tmp_path / "run").exit_code == 0
    file.write_text(file.read_text().replace('"8"', '"9"', 1))
    result = rlhf_here("train", "--resume", tmp_path / "run", "--train.steps", "4")
    assert result.exit_code == 2
    assert "the data, or its tokens, changed since the checkpoint" in result.output
