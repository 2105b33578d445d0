"""Process reward models, from steps in a file to a model that transformers loads."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer


def step(a, b, right):
    return f"{a}+{b}={a + b if right else 'what?'}"


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """Sums, each step of them right, or without an answer."""
    rows = []
    for number in range(40):
        labels = [(number + place) % 3 != 0 for place in range(2)]
        parts = [step(number % 7, place, right) for place, right in enumerate(labels)]
        rows.append({"prompt": "add: ", "completions": parts, "labels": labels})
    path = tmp_path_factory.mktemp("steps") / "steps.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def flags(tiny_model, steps, tmp_path):
    def make(*more):
        data = ["--data", steps, "--eval.data", steps, "--actor.model", tiny_model, "--train.batch-size", "8"]
        return ["train", "--algo", "prm", *data, "--actor.lr", "1e-2", "--run-dir", tmp_path / "run", *more]

    return make


def curve(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_steps_are_told_apart_and_both_classes_of_transformers_load_the_model(rlhf_here, flags, tmp_path, tiny_model):
    result = rlhf_here(*flags("--data.epochs", "10", "--algo.separator", "!"))
    assert result.exit_code == 0, result.output
    assert "40 rows" in result.output
    rows = curve(tmp_path / "run")
    assert rows[0]["eval/loss"] == pytest.approx(0.6931, abs=1e-3)  # the new head is 0
    assert rows[-1]["eval/accuracy"] > 0.9
    assert rows[-1]["eval/scores/right"] > 0 > rows[-1]["eval/scores/wrong"]

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokens, info = AutoModelForTokenClassification.from_pretrained(tmp_path / "run/model", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    sequence = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run/model")
    ids = torch.tensor([tokenizer("add: 3+0=3!3+1=what?!")["input_ids"]])
    with torch.no_grad():
        each, score = tokens(ids).logits[0, :, 0], sequence(ids).logits[0, 0]
    ends = (ids[0] == tokenizer.convert_tokens_to_ids("!")).nonzero().squeeze(-1)
    right, wrong = each[ends].tolist()
    assert right > 0 > wrong
    assert float(score) == pytest.approx(wrong, abs=1e-5)


def test_the_last_step_alone_may_count(rlhf_here, flags, tmp_path):
    assert rlhf_here(*flags("--algo.last-step-only", "true", "--data.epochs", "1")).exit_code == 0
    assert [row.get("tokens") for row in curve(tmp_path / "run")][1:] == [16.0] * 5


def test_a_run_in_two_processes_is_the_run_in_one_and_a_resumed_one_too(rlhf, rlhf_here, flags, tmp_path):
    common = ("--kernels", "none", "--train.steps", "4", "--eval.at-end", "false")
    rlhf.run(*flags(*common))
    whole = curve(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "whole")
    rlhf.run(*flags(*common, "--runtime", "ray", "--placement", "actor=2"))
    for here, there in zip(whole, curve(tmp_path / "run"), strict=True):
        for name in ("loss", "grad_norm", "accuracy", "eval/loss"):
            assert (name in here) == (name in there)
            assert here.get(name) == pytest.approx(there.get(name), abs=1e-5), name
    (tmp_path / "run").rename(tmp_path / "ray")
    assert rlhf_here(*flags("--kernels", "none", "--train.steps", "2", "--eval.at-end", "false")).exit_code == 0
    assert rlhf_here("train", "--resume", tmp_path / "run", "--train.steps", "4").exit_code == 0
    again = curve(tmp_path / "run")
    assert [row.get("loss") for row in again] == [row.get("loss") for row in whole]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--algo.separator", ""), "separator"),
        (("--algo.last-step-only", "maybe"), "last-step-only"),
        (("--reward", "vowels"), "prm trains on stepwise data, and samples and scores nothing: leave --reward out"),
    ],
)
def test_bad_options_are_refused(more, message, rlhf_here, flags, tmp_path):
    result = rlhf_here(*flags(*more))
    assert result.exit_code == 2
    assert message in result.output
    assert not (tmp_path / "run").exists()


def test_other_data_is_refused_with_what_fits(rlhf_here, flags, prompts):
    result = rlhf_here(*flags("--data", prompts, "--dry-run"))
    assert result.exit_code == 2
    assert "prm needs stepwise data" in result.output
