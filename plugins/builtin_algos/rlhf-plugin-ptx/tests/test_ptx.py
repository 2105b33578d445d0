"""The loss beside the policy's: its value and gradient, the order of rows, resumes, and what is refused."""

from __future__ import annotations

import json
import math
from importlib.resources import files

import pytest
import torch
from rlhf_authoring.learner import SUMS, Learner, right_answer
from transformers import AutoModelForCausalLM, AutoTokenizer

import rlhf_host
from rlhf_host import UserError, hookimpl
from rlhf_host import functional as F

QUICKSTART = str(files("rlhf_host") / "models" / "quickstart")
TEXTS = [{"prompt": f"{a}*{b}=", "completion": str(a * b)} for a, b in ((3, 4), (12, 5), (7, 8), (9, 9), (11, 11), (2, 6))]


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in TEXTS))
    return path


def train(run, texts, **more):
    fixed = {"train.threads": 1, "actor.model": "quickstart", "rollout.max_new_tokens": 4, "n": 4, "batch_size": 4, "steps": 3}
    options = {} if texts is None else {"extensions": ["ptx"], "ptx.data": str(texts), "ptx.rows": 4}
    asked = {"algo": Learner(), "reward": right_answer, "data": SUMS, "lr": 1e-3, **options, **fixed, **more}
    return rlhf_host.train(run_dir=str(run), **asked)


def curve(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def nll(model, row):
    """``(sum, tokens)`` by transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompt, answer = (tokenizer(row[name], add_special_tokens=False)["input_ids"] for name in ("prompt", "completion"))
    answer = [*answer, tokenizer.eos_token_id]
    ids = torch.tensor([prompt + answer])
    with torch.no_grad():
        logs = AutoModelForCausalLM.from_pretrained(model)(input_ids=ids).logits[0].log_softmax(-1)
    return -sum(float(logs[len(prompt) + place - 1, token]) for place, token in enumerate(answer)), len(answer)


def test_the_metric_is_the_likelihood_of_the_rows_alone(tmp_path, texts):
    train(tmp_path / "run", texts, steps=1, **{"ptx.rows": 6})
    sums, counts = zip(*(nll(QUICKSTART, row) for row in TEXTS), strict=True)
    assert curve(tmp_path / "run")[0]["ptx/nll"] == pytest.approx(sum(sums) / sum(counts), rel=1e-5)
    assert curve(tmp_path / "run")[0]["loss/ptx"] == pytest.approx(0.05 * sum(sums) / sum(counts), rel=1e-5)


def test_the_policys_part_is_as_without(tmp_path, texts):
    train(tmp_path / "with", texts, steps=1)
    train(tmp_path / "without", None, steps=1)
    one, two = curve(tmp_path / "with")[0], curve(tmp_path / "without")[0]
    for name in ("loss/policy", "entropy", "reward/mean", "advantages/std", "mismatch/max", "length/mean"):
        assert one[name] == pytest.approx(two[name], rel=1e-5, abs=1e-6), name
    assert one["grad_norm"] != pytest.approx(two["grad_norm"], rel=1e-3)


def test_the_rows_are_learnt(tmp_path, texts):
    train(tmp_path / "run", texts, steps=30, **{"ptx.coef": 1.0, "ptx.rows": 6})
    found = [row["ptx/nll"] for row in curve(tmp_path / "run")]
    assert found[-1] < 0.5 * found[0]
    assert math.isfinite(found[-1])


def test_the_rows_train_no_policy_that_is_idle(tmp_path, texts):
    class Late(Learner):
        @hookimpl
        def needs(self):
            return F.policy_needs(F.PolicyLossOptions(), min_group_size=2, idle_steps=2)

    rates = {"actor.schedule": "linear", "train.epochs": 2, "train.old_logprobs": "recompute"}
    train(tmp_path / "run", texts, algo=Late(), steps=4, **rates)
    rows = curve(tmp_path / "run")
    assert [("loss/ptx" in row, "loss/policy" in row, "lr" in row) for row in rows] == [(False,) * 3] * 2 + [(True,) * 3] * 2
    assert all(math.isfinite(row["ptx/nll"]) for row in rows)
    # Four updates, of which each step's two are averaged.
    assert [row["lr"] for row in rows[2:]] == pytest.approx([1e-3 * 0.875, 1e-3 * 0.375])


@pytest.mark.parametrize("more", [{}, {"train.minibatches": 3}, {"train.epochs": 2}])
def test_a_resumed_run_goes_on_with_the_rows_that_come_next(tmp_path, texts, more):
    train(tmp_path / "whole", texts, steps=4, **more)
    train(tmp_path / "run", texts, steps=2, **more)
    rlhf_host.train(resume=str(tmp_path / "run"), algo=Learner(), reward=right_answer, data=SUMS, steps=4)
    for name in ("ptx/nll", "loss", "grad_norm"):
        assert [row[name] for row in curve(tmp_path / "run")] == [row[name] for row in curve(tmp_path / "whole")], name


class Chooser:
    """Trains on the best answers, without advantages."""

    @hookimpl
    def needs(self):
        return F.policy_needs(F.PolicyLossOptions())

    @hookimpl
    def make_rows(self, groups):
        return [group.trajectories[0] for group in groups]

    @hookimpl
    def compute_loss(self, outputs, batch):
        return []


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"rollout.temperature": 0.7}, "ptx is a loss at temperature 1, and rollout.temperature is 0.7"),
        ({"ptx.data": "nowhere.jsonl"}, "nowhere.jsonl"),
        (
            {"algo": Chooser()},
            "gives rows that train beside sampled ones with advantages, and python:Chooser has no advantages",
        ),
    ],
)
def test_what_it_cannot_do_is_refused_before_the_run(tmp_path, texts, more, said):
    with pytest.raises(UserError, match=said):
        train(tmp_path / "run", texts, **more)
    assert not (tmp_path / "run").exists()


def test_a_bad_row_is_told_with_its_line(tmp_path, texts):
    texts.write_text(texts.read_text() + '{"prompt": "1+1=", "completion": 2}\n')
    with pytest.raises(UserError, match=r"texts.jsonl, line 7|texts.jsonl:7"):
        train(tmp_path / "run", texts)
