"""Real runs: which answers are greedy and which are trained, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

import rlhf_host
from rlhf_host import UserError

DATA = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a, b in ((17, 35), (38, 26), (41, 29), (56, 17))]
FIXED = {"train.threads": 1, "actor.model": "quickstart", "rollout.max_new_tokens": 4, "n": 4, "batch_size": 4, "steps": 2}


SAVED = {"algo": "remax", **{name: FIXED[name] for name in FIXED if name != "n"}, "steps": 1}


def length(text, label):
    return sum(map(ord, text)) / 100


def train(run, **more):
    settings = {
        "algo": "remax",
        "agent": "remax",
        "data": DATA,
        "reward": length,
        "lr": 1e-4,
        "trajectories.every": 1,
        "trajectories.tokens": True,
    }
    rlhf_host.train(run_dir=str(run), **{**FIXED, **settings, **more})
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def rows_of(run, step):
    return [json.loads(line) for line in (run / f"trajectories/train-step-{step:06}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("more", [{}, {"train.old_logprobs": "sampler", "train.epochs": 2}])
def test_the_first_answer_is_the_models_likeliest_and_no_other_is_the_baseline(tmp_path, more):
    metrics = train(tmp_path / "run", **{"rollout.temperature": 1.5, **more})
    assert all(row["grad_norm"] > 0 and row["mismatch/max"] < 1e-4 for row in metrics)
    assert all(row.get("ratio/max_log", 0.0) < 1.0 for row in metrics)
    model = AutoModelForCausalLM.from_pretrained(rlhf_host.__path__[0] + "/models/quickstart")
    rows = rows_of(tmp_path / "run", 1)
    greedy = [row for row in rows if row["columns"]["greedy"] == 1]
    assert len(greedy) == 4
    assert {row["sample"] for row in greedy} == {0}
    for row in greedy:
        prompt, answer = (list(segment["token_ids"]) for segment in row["segments"])
        with torch.no_grad():
            likeliest = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].argmax(-1)
        assert answer == likeliest.tolist()
        assert "advantage" not in row
    baselines = {row["group_id"]: row["reward"] for row in greedy}
    for row in rows:
        if row["columns"]["greedy"] == 0:
            assert row["advantage"] == pytest.approx(row["reward"] - baselines[row["group_id"]], abs=1e-5)


def train_on_saved(tmp_path, **settings):
    """Trains in ``again`` on the answers that the first step of ``run`` sampled."""
    settings |= {"algo": "remax", "actor.model": "quickstart", "batch_size": 4, "rollout.max_new_tokens": 4}
    saved = tmp_path / "run/trajectories/train-step-000001.jsonl"
    settings |= {"steps": 1, "train.threads": 1, "from_trajectories": str(saved)}
    rlhf_host.train(run_dir=str(tmp_path / "again"), **settings)


def test_saved_answers_are_compared_with_the_greedy_ones_among_them(tmp_path):
    pytest.importorskip("rlhf_samples", reason="reads saved answers")
    (first,) = train(tmp_path / "run", steps=1)
    train_on_saved(tmp_path, lr=1e-4)
    (again,) = [json.loads(line) for line in (tmp_path / "again/metrics.jsonl").read_text().splitlines()]
    for name in ("remax/greedy", "remax/sampled", "remax/better", "advantages/std", "grad_norm"):
        assert again[name] == pytest.approx(first[name], rel=1e-4)


def test_saved_answers_of_another_agent_are_refused(tmp_path):
    pytest.importorskip("rlhf_plugin_rloo")
    train(tmp_path / "run", algo="rloo", agent="single_turn", steps=1)
    with pytest.raises(UserError, match="those of a run with agent remax"):
        train_on_saved(tmp_path)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"agent": "single_turn"}, "add agent remax"),
        ({"n": 1}, "rollout.n"),
        ({"algo": {"name": "remax", "std": "group"}}, "std"),
    ],
)
def test_what_has_no_greedy_answer_is_refused(tmp_path, more, said):
    with pytest.raises(UserError, match=said):
        train(tmp_path / "run", **more)
    assert not (tmp_path / "run").exists()
