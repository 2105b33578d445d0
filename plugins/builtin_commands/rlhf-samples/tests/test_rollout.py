"""``rlhf rollout``: how much it samples, what it says, and what is in the file."""

import json
import signal
from pathlib import Path

import pytest

from rlhf_host.runs import read_steps


@pytest.fixture
def rollout(rlhf_here, sampling, tmp_path):
    """Run in this process; gives the rows of the file, and the output."""

    def run(*flags, code=0, output="rollouts.jsonl"):
        result = rlhf_here("rollout", *sampling, "--output", output, *flags)
        assert result.exit_code == code, result.output
        assert "Traceback" not in result.output
        path = tmp_path / output
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return rows, result.stdout if code == 0 else result.output

    return run


def test_rollouts_may_be_counted(rollout):
    rows, _ = rollout("--rollouts", "22")
    assert [row["step"] for row in rows] == [1] * 16 + [2] * 8
    assert len({row["group_id"] for row in rows}) == 6


def test_a_summary_is_shown_or_printed_as_json(rollout):
    rows, output = rollout("--json")
    found = json.loads(output)
    assert found["trajectories"] == 16
    assert found["groups"] == 4
    assert found["reward_mean"] == pytest.approx(sum(row["reward"] for row in rows) / 16)
    _, output = rollout("--steps", "1", output="again.jsonl")
    assert "rlhf train --from-trajectories" in output


def test_without_a_reward_everything_is_kept_and_unjudged(rlhf_here, tiny_model, prompts):
    flags = ["--actor.model", tiny_model, "--data", prompts, "--rollout.n", "2", "--rollout.max-new-tokens", "4"]
    result = rlhf_here("rollout", *flags, "--train.batch-size", "3", "--output", "bare.jsonl")
    assert result.exit_code == 0, result.output
    (step,) = read_steps(Path("bare.jsonl"))
    assert [(row.group_id, row.sample, row.reward) for row in step.rows] == [
        (f"train-1-{group}", sample, None) for group in range(3) for sample in range(2)
    ]


def test_what_cannot_be_sampled_or_written_is_refused_first(rlhf_here, rollout, sampling, tiny_model):
    assert "no file is given: add --output FILE.jsonl" in rlhf_here("rollout", *sampling).output
    rollout()
    _, output = rollout(code=2)
    assert "this file already exists" in output
    assert "give it a name that ends in .jsonl" in rollout(code=2, output="rollouts.txt")[1]
    assert "--steps 0: should be a whole number from 1" in rollout("--steps", "0", code=2)[1]
    assert "give one" in rollout("--steps", "1", "--rollouts", "3", code=2)[1]
    assert "no data: give --data PATH" in rlhf_here("rollout", "--actor.model", tiny_model, "--output", "x.jsonl").output


def test_an_interrupted_rollout_keeps_its_finished_steps(rlhf_process, sampling, tmp_path):
    process = rlhf_process("rollout", *sampling, "--output", tmp_path / "many.jsonl", "--steps", "4000")
    assert "step 1/4000: 16 trajectories\n" in iter(process.stderr.readline, "")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "Interrupted; the finished steps are in" in out
    steps = read_steps(tmp_path / "many.jsonl")
    assert 1 <= len(steps) < 4000
    assert {len(step.rows) for step in steps} == {16}
