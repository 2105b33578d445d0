"""Distillation on the real command line: a student comes nearer to its teacher, in one process and in two."""

from __future__ import annotations

import json

import pytest
import torch
from rlhf_authoring.models import tiny_tokenizer, write_tiny_model
from transformers import AutoModelForCausalLM

MACHINE = ("time/", "memory/", "engine/", "sync/", "tokens_per_s", "tflops", "mfu")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    path = write_tiny_model(tmp_path_factory.mktemp("teacher") / "model", seed=7)
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        model.lm_head.weight.mul_(12)  # a random model knows nothing
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    rows = [{"prompt": f"{a}+{b}=", "completion": f"{a + b}, so it is {a + b}."} for a in range(8) for b in range(5)]
    path = tmp_path_factory.mktemp("answers") / "answers.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def flags(tiny_model, teacher, answers, prompts, tmp_path):
    """``flags(algo, ...)``: a command, which writes to ``tmp_path / "run"``."""

    def make(algo, *more):
        start = ["train", "--algo", algo, "--actor.model", tiny_model, "--teacher.model", teacher, "--actor.lr", "1e-2"]
        offline = ["--data", answers, "--train.batch-size", "8", "--eval.data", answers]
        small = ("--rollout.n", "2", "--rollout.max-new-tokens", "8", "--train.batch-size", "4")
        data = offline if algo == "distill" else ["--data", prompts, *small]
        return [*start, *data, "--run-dir", tmp_path / "run", *more]

    return make


def curve(run_dir):
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith(MACHINE)} for row in rows]


def gap(student, teacher, text="3+4=7, so it is 7."):
    """Mean KL(teacher ‖ student) over every place of a text, by transformers alone."""
    ids = torch.tensor([tiny_tokenizer()(text)["input_ids"]])
    with torch.no_grad():
        own, theirs = (
            AutoModelForCausalLM.from_pretrained(path)(input_ids=ids).logits.log_softmax(-1) for path in (student, teacher)
        )
    return float((theirs.exp() * (theirs - own)).sum(-1).mean())


@pytest.mark.parametrize("more", [(), ("--algo.beta", "0.5"), ("--algo.top-k", "8")])
def test_a_student_learns_its_teachers_distribution_from_a_data_set(more, rlhf_here, flags, tmp_path, tiny_model, teacher):
    result = rlhf_here(*flags("distill", "--data.epochs", "6", *more))
    assert result.exit_code == 0, result.output
    rows = curve(tmp_path / "run")
    assert rows[-1]["eval/divergence"] < 0.6 * rows[0]["eval/divergence"]
    assert gap(tmp_path / "run/model", teacher) < 0.6 * gap(tiny_model, teacher)


@pytest.mark.parametrize(
    "more",
    [
        ("--rollout.n", "16", "--train.steps", "40"),
        ("--algo.signal", "full"),
        ("--algo.signal", "full", "--algo.top-k", "8", "--algo.beta", "0"),
    ],
)
def test_a_student_learns_from_its_teacher_on_its_own_answers(more, rlhf_here, flags, tmp_path):
    result = rlhf_here(*flags("on_policy_distill", "--train.steps", "20", *more))
    assert result.exit_code == 0, result.output
    rows = curve(tmp_path / "run")
    name = "divergence" if "full" in more else "teacher/kl"
    values = [row[name] for row in rows if name in row]
    assert sum(values[-3:]) < 0.75 * sum(values[:3]), values
    assert not any(metric.startswith("reward/") for metric in rows[-1])


@pytest.mark.parametrize("algo", ["distill", "on_policy_distill"])
def test_a_resumed_run_is_the_run_that_never_stopped(algo, rlhf_here, flags, tmp_path):
    settings = ("--train.steps", "4", "--eval.at-end", "false")
    result = rlhf_here(*flags(algo, *settings))
    assert result.exit_code == 0, result.output
    (tmp_path / "run").rename(tmp_path / "whole")
    assert rlhf_here(*flags(algo, "--train.steps", "2", "--eval.at-end", "false")).exit_code == 0
    assert rlhf_here("train", "--resume", tmp_path / "run", "--train.steps", "4").exit_code == 0
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")


def test_two_ranks_under_ray_train_as_one_process_does_with_the_teacher_elsewhere(rlhf, flags, tmp_path):
    common = flags("distill", "--kernels", "none", "--algo.top-k", "8", "--train.steps", "4", "--eval.at-end", "false")
    rlhf.run(*common)
    alone = curve(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "alone")
    rlhf.run(*common, "--runtime", "ray", "--ray.num-cpus", "4", "--placement", "actor=2", "--placement", "teacher=1")
    for here, there in zip(alone, curve(tmp_path / "run"), strict=True):
        for name in ("loss", "grad_norm", "divergence", "nll", "eval/loss"):
            assert (name in here) == (name in there)
            assert here.get(name) == pytest.approx(there.get(name), abs=1e-5), name


@pytest.mark.parametrize("algo", ["distill", "on_policy_distill"])
def test_a_teacher_with_other_tokens_is_refused_before_anything_is_written(algo, rlhf_here, flags, teacher, tmp_path):
    other = tmp_path / "other"
    AutoModelForCausalLM.from_pretrained(teacher).save_pretrained(other)
    tokenizer = json.loads((teacher / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["7"], vocabulary["8"] = vocabulary["8"], vocabulary["7"]
    for name in ("tokenizer_config.json",):
        (other / name).write_text((teacher / name).read_text())
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    for more in ((), ("--dry-run",)):
        result = rlhf_here(*flags(algo, "--teacher.model", other, *more))
        assert result.exit_code == 2
        assert "has other tokens than the actor: 2 differ, such as '7' (10, there 11), '8' (11, there 10)" in result.output
    assert not (tmp_path / "run").exists()


def test_vocabularies_of_two_sizes_are_refused_where_whole_distributions_are_compared(rlhf_here, flags, teacher, tmp_path):
    other = tmp_path / "other"
    model = AutoModelForCausalLM.from_pretrained(teacher)
    model.resize_token_embeddings(64)
    model.save_pretrained(other)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (other / name).write_text((teacher / name).read_text())
    result = rlhf_here(*flags("distill", "--teacher.model", other))
    assert result.exit_code == 2
    assert "has a vocabulary of 64 tokens, and the actor one of" in result.output
    assert not (tmp_path / "run").exists()
    assert rlhf_here(*flags("distill", "--teacher.model", other, "--algo.top-k", "4", "--dry-run")).exit_code == 0


@pytest.mark.parametrize(
    ("algo", "more", "message"),
    [
        ("distill", ("--algo.alpha", "0"), "alpha"),
        ("distill", ("--algo.tail", "renormalise"), "top_k is 0: set top_k, or leave tail out"),
        ("distill", ("--reward", "vowels"), "distill trains on prompt_completion data, and samples and scores nothing"),
        ("on_policy_distill", ("--algo.top-k", "8"), "signal sample compares sampled tokens and has no top_k"),
        ("on_policy_distill", ("--algo.signal", "full", "--with", "tis"), "the loss of algo:on_policy_distill takes none"),
    ],
)
def test_bad_options_are_refused(algo, more, message, rlhf_here, flags, tmp_path):
    result = rlhf_here(*flags(algo, *more))
    assert result.exit_code == 2
    assert message in result.output
    assert not (tmp_path / "run").exists()


def test_a_teacher_must_be_named(rlhf_here, tiny_model, answers):
    result = rlhf_here("train", "--algo", "distill", "--actor.model", tiny_model, "--data", answers, "--dry-run")
    assert result.exit_code == 2
    assert "the role 'teacher' has no model: give --teacher.model PATH" in result.output
