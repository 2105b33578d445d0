"""Several teachers, and teachers with their own tokenizers, on the real command line."""

from __future__ import annotations

import json
import re

import pytest
import rlhf_plugin_distill
from click.testing import CliRunner

from rlhf_host.cli.main import main

from .other_tokenizers import byte_level, lower_case, sentence_piece, write_model

ASKED = [f"{a}+{b}=" for a in range(6) for b in range(4)]
ROWS = [{"prompt": text, "completion": f" the sum is so and so: {text[0]}é {text[2]}.", "topic": "math"} for text in ASKED]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Directories of tiny models: the student, a teacher with the same tokenizer, and teachers with others; plain and for chats."""
    root = tmp_path_factory.mktemp("models")
    made = {"student": (byte_level(320), 1, 1.0), "same": (byte_level(320), 7, 10.0), "coarse": (byte_level(500), 8, 10.0)}
    made["pieces"] = (sentence_piece(300), 9, 10.0)
    made |= {"chat": (byte_level(320, chat=True), 1, 1.0), "inst": (sentence_piece(300, chat=True), 9, 10.0)}
    made["folded"] = (lower_case(), 3, 1.0)
    return {name: write_model(root / name, each[0], seed=each[1], sharper=each[2]) for name, each in made.items()}


@pytest.fixture
def rlhf(tmp_path, models, monkeypatch):
    """``rlhf(algo, *flags, student=..., teacher=...)``: the outcome of a run in ``tmp_path / "run"``."""
    monkeypatch.setenv("COLUMNS", "250")
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))

    def run(algo, *more, student="student", **teachers):
        flags = ["train", "--algo", algo, "--actor.model", models[student], "--data", data, "--run-dir", tmp_path / "run"]
        for name, model in (teachers or {"teacher": "pieces"}).items():
            flags += [f"--roles.{name}.model", models[model]]
        flags += ["--train.batch-size", "8", "--actor.lr", "1e-2", "--train.threads", "1"]
        if algo == "on_policy_distill":
            flags += ["--rollout.n", "2", "--rollout.max-new-tokens", "8", "--data.prompt-key", "prompt"]
        return CliRunner().invoke(main, [str(flag) for flag in (*flags, *more)])

    return run


def metrics(tmp_path):
    return [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]


def values(tmp_path, name):
    return [row[name] for row in metrics(tmp_path) if name in row]


@pytest.mark.parametrize("student", ["student", "chat"])
@pytest.mark.parametrize("more", [(), ("--algo.across", "uld"), ("--algo.top-k", "16", "--algo.beta", "0.5")])
def test_a_student_comes_nearer_to_a_teacher_with_another_tokenizer(more, student, rlhf, tmp_path, caplog):
    teacher = "pieces" if student == "student" else "inst"
    result = rlhf("distill", "--algo.own-tokens", "true", "--data.epochs", "8", *more, student=student, teacher=teacher)
    assert result.exit_code == 0, result.output
    found = values(tmp_path, "teacher/divergence")
    assert found[-1] < 0.8 * found[0], found
    assert min(values(tmp_path, "teacher/aligned")) > 0.95
    assert min(values(tmp_path, "teacher/same_tokens")) > 0.5
    assert "one token of the teacher" not in caplog.text


def test_a_teacher_that_shares_few_tokens_is_named_once(rlhf, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(rlhf_plugin_distill, "FEW", 1.01)
    rlhf("distill", "--algo.own-tokens", "true", student="student", teacher="pieces")
    assert len(values(tmp_path, "teacher/same_tokens")) > 1
    share = values(tmp_path, "teacher/same_tokens")[0]
    assert caplog.text.count(f"{100 * share:.0f} % of the pieces of text are one token of the teacher 'teacher'") == 1


@pytest.mark.parametrize("student", ["student", "chat"])
@pytest.mark.parametrize("more", [("--algo.signal", "full", "--algo.beta", "0"), ()])
def test_a_student_learns_from_its_own_answers_by_their_texts(more, student, rlhf, tmp_path):
    teacher = "pieces" if student == "student" else "inst"
    steps = ("--train.steps", "30")
    result = rlhf("on_policy_distill", "--algo.own-tokens", "true", *steps, *more, student=student, teacher=teacher)
    assert result.exit_code == 0, result.output
    found = values(tmp_path, "teacher/divergence" if more else "teacher/kl")
    assert sum(found[-3:]) < 0.9 * sum(found[:3]), found


def test_a_teacher_with_the_same_tokens_gives_the_same_run_by_tokens_and_by_texts(rlhf, tmp_path):
    runs = []
    for more in (("--algo.teachers", '{"math": 1}'), ("--algo.teachers", '{"math": 1}', "--algo.own-tokens", "true")):
        result = rlhf("distill", "--train.steps", "3", *more, math="same")
        assert result.exit_code == 0, result.output
        runs.append(values(tmp_path, "math/divergence"))
        (tmp_path / "run").rename(tmp_path / f"run-{len(runs)}")
    assert runs[0] == pytest.approx(runs[1], rel=1e-4)


@pytest.mark.parametrize(
    ("algo", "teacher", "more"),
    [
        ("distill", "pieces", ("--algo.beta", "0.5")),
        ("on_policy_distill", "coarse", ("--algo.signal", "full", "--rollout.temperature", "0.7")),
    ],
)
def test_the_top_k_of_all_tokens_is_the_whole_distribution(algo, teacher, more, rlhf, tmp_path, models):
    """The rest that counts as one has a share of at least 1e-6, and nothing else is different: neither with a teacher that has
    fewer tokens of its own than the student, nor with one that has more.
    """
    size = json.loads((models[teacher] / "config.json").read_text())["vocab_size"]
    runs = []
    for top in ((), ("--algo.top-k", size)):
        result = rlhf(algo, "--train.steps", "3", "--algo.own-tokens", "true", *more, *top, teacher=teacher)
        assert result.exit_code == 0, result.output
        runs.append([values(tmp_path, name) for name in ("teacher/divergence", "grad_norm")])
        (tmp_path / "run").rename(tmp_path / f"run-{len(runs)}")
    for whole, likeliest in zip(*runs, strict=True):
        assert whole == pytest.approx(likeliest, rel=1e-4)


@pytest.mark.parametrize("own", ["false", "true"])
@pytest.mark.parametrize("algo", ["distill", "on_policy_distill"])
def test_rows_go_to_the_teacher_that_their_column_names(algo, own, rlhf, tmp_path):
    rows = [{**row, "topic": "math" if number % 4 else "code"} for number, row in enumerate(ROWS)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = ("--algo.teachers", '{"math": 1, "code": 0.5}', "--algo.teacher-key", "topic", "--algo.own-tokens", own)
    more += ("--train.steps", "4")
    others = {"math": "same", "code": "same"} if own == "false" else {"math": "pieces", "code": "coarse"}
    result = rlhf(algo, *more, **others)
    assert result.exit_code == 0, result.output
    name = "divergence" if algo == "distill" else "kl"
    for teacher in others:
        assert values(tmp_path, f"{teacher}/{name}"), metrics(tmp_path)[0]
    if algo == "distill":
        first = metrics(tmp_path)[0]
        assert first["loss"] == pytest.approx(first["loss/math/divergence"] + first["loss/code/divergence"], rel=1e-5)


@pytest.mark.parametrize("algo", ["distill", "on_policy_distill"])
@pytest.mark.parametrize(
    ("row", "message"), [({"topic": "poetry"}, "'poetry', and the teachers are math, code"), ({}, "has no column 'topic'")]
)
def test_a_row_with_an_unknown_teacher_is_refused_with_its_place(algo, row, message, rlhf, tmp_path):
    rows = [*ROWS[:2], {name: value for name, value in ROWS[2].items() if name != "topic"} | row, *ROWS[3:]]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = ("--algo.teachers", '{"math": 1, "code": 1}', "--algo.teacher-key", "topic")
    result = rlhf(algo, *more, math="same", code="same")
    assert result.exit_code == 2, result.output
    assert re.search(r"rows\.jsonl, line 3:|rows\.jsonl:3:", result.output)
    assert message in result.output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("algo", ["distill", "on_policy_distill"])
def test_a_resumed_run_is_the_run_that_never_stopped(algo, rlhf, tmp_path):
    flags = ("--algo.own-tokens", "true", "--eval.at-end", "false")
    assert rlhf(algo, *flags, "--train.steps", "4").exit_code == 0
    whole = values(tmp_path, "loss")
    (tmp_path / "run").rename(tmp_path / "whole")
    assert rlhf(algo, *flags, "--train.steps", "2").exit_code == 0
    result = CliRunner().invoke(main, ["train", "--resume", str(tmp_path / "run"), "--train.steps", "4"])
    assert result.exit_code == 0, result.output
    assert values(tmp_path, "loss") == whole


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ((), "has other tokens than the actor"),
        (("--algo.own-tokens", "true", "--roles.teacher.precompute", "true"), "only log-probabilities are computed before"),
    ],
)
def test_runs_that_cannot_be_are_refused_before_they_start(more, message, rlhf, tmp_path):
    result = rlhf("distill", "--algo.top-k", "8", *more)
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert not (tmp_path / "run").exists()


def test_a_teacher_whose_tokenizer_does_not_keep_texts_is_refused(rlhf, tmp_path):
    result = rlhf("distill", "--algo.own-tokens", "true", "--dry-run", teacher="folded")
    assert result.exit_code == 2, result.output
    assert "the role 'teacher': its tokenizer does not keep texts" in result.output


def test_rows_of_tokens_have_no_text_for_a_teacher(rlhf, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]}) + "\n")
    result = rlhf("distill", "--algo.own-tokens", "true", "--train.batch-size", "1")
    assert result.exit_code == 2, result.output
    assert "the row has tokens and no text, which the role 'teacher' needs" in result.output


@pytest.mark.parametrize("parts", [("--placement", "actor=2", "--placement", "teacher=1"), ("--placement", "actor+teacher=2")])
def test_teachers_on_ray_teach_as_in_one_process(parts, rlhf, tmp_path):
    together = "+" in parts[1]
    more = ("--algo.own-tokens", "true", "--kernels", "none", "--train.steps", "3", "--eval.at-end", "false")
    more += () if together else ("--algo.top-k", "16")
    runs = []
    for where in ((), ("--runtime", "ray", "--ray.num-cpus", "4", *parts)):
        result = rlhf("distill", *more, *where)
        assert result.exit_code == 0, result.output
        runs.append(metrics(tmp_path))
        (tmp_path / "run").rename(tmp_path / f"run-{len(runs)}")
    for here, there in zip(*runs, strict=True):
        for name in ("loss", "teacher/divergence", "teacher/aligned", "grad_norm"):
            assert here.get(name) == pytest.approx(there.get(name), abs=1e-5), name


def test_a_whole_distribution_is_not_sent_to_another_place(rlhf, tmp_path):
    more = ("--runtime", "ray", "--ray.num-cpus", "4", "--placement", "actor=2", "--placement", "teacher=1")
    result = rlhf("distill", "--algo.own-tokens", "true", *more)
    assert result.exit_code == 2, result.output
    assert "so they have to be in one place" in result.output
