"""``rlhf generate`` and ``rlhf replay`` with algorithms of other packages."""

from __future__ import annotations

import json

import pytest
import rlhf_samples

import rlhf_host

SCORE = "{prompt} <{reward:.2f}> "
SUMS = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a, b in ((17, 35), (38, 26), (41, 29), (56, 17))]


@pytest.mark.parametrize("condition", [(), ("--data.condition", SCORE, "--eval.data.condition", SCORE)])
def test_generated_answers_are_data_to_train_on(rlhf_here, tiny_model, prompts, tmp_path, condition):
    best, run_dir, model = tmp_path / "best.jsonl", tmp_path / "run", ("--actor.model", tiny_model, "--kernels", "none")
    sampling = ("--rollout.n", "4", "--rollout.max-new-tokens", "100", "--train.batch-size", "5", "--reward", "vowels")
    result = rlhf_here("generate", *model, "--data", prompts, *sampling, "--output", best)
    assert result.exit_code == 0, result.output
    settings = (*model, "--train.batch-size", "8", "--actor.lr", "1e-3", "--run-dir", run_dir)
    result = rlhf_here("train", "--algo", "sft", "--data", best, "--eval.data", best, *settings, *condition)
    assert result.exit_code == 0, result.output
    assert "read as generated" in result.output
    assert ("> ⟦" in result.output) == bool(condition)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["eval/nll"] < rows[0]["eval/nll"]


def right(text, label):
    return float(text.strip() == label)


def test_a_replay_writes_the_prompts_of_the_run(tmp_path):
    words = {"template": "{solution} {prompt}", "solution_template": "{solution}", "feedback_template": "[{feedback}]"}
    common = {"algo": {"name": "sdpo", **words, "feedback": "never"}, "rewards": right, "n": 8}
    run = rlhf_host.train(
        **common,
        model="quickstart",
        data=SUMS,
        steps=1,
        batch_size=4,
        max_new_tokens=4,
        run_dir=tmp_path / "run",
        train={"threads": 1},
        checkpoint={"every": 1, "keep": 0},
        trajectories={"tokens": True, "every": 1, "max_per_step": 0},
    )
    first = run.run_dir / "checkpoints/step-000001/model"
    found = rlhf_samples.replay(run.run_dir, model=first, **common).summary()
    assert found["trajectories"] == 32
    assert found["rewards_changed"] == found["advantages_changed"] == 0
