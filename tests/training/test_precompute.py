"""Log-probabilities that are computed before the run: the same numbers without the model, and never those of something else."""

from __future__ import annotations

import json
import shutil

import pytest
from rlhf_authoring.models import write_tiny_model
from rlhf_rows import stored_logprobs
from safetensors.torch import load_file, save_file


@pytest.fixture
def pairs(tmp_path):
    path = tmp_path / "pairs.jsonl"
    rows = [
        {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(17 * (a + b))} for a in range(3, 7) for b in range(2, 5)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def run(rlhf_here, tiny_model, pairs, tmp_path, monkeypatch):
    """``run(name, algo, ...)``: a run's metrics, and what it said."""
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "cache"))

    def train(name, algo, *more):
        data = ["--data", pairs, "--eval.data", pairs, "--actor.model", tiny_model, "--actor.lr", "1e-2"]
        flags = ["--train.batch-size", "5", "--data.epochs", "1.5", "--checkpoint.final", "false"]
        result = rlhf_here("train", "--algo", algo, *data, *flags, "--run-dir", tmp_path / name, *more)
        assert result.exit_code == 0, result.output
        return [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()], result.output

    return train


PRECOMPUTE = ("--reference.precompute", "true")
COMPUTED, USED = "to compute its log-probabilities before the run", "that an earlier run stored"


@pytest.mark.parametrize("algo", ["dpo", "kto"])
def test_the_run_is_the_same_without_the_model(run, algo, tmp_path):
    # Not the actor's own weights: margins would be rounding errors at first, whose signs would be compared.
    other = ("--reference.model", write_tiny_model(tmp_path / "other", seed=3))
    plain, said = run("plain", algo, *other)
    assert "Loading actor, reference ..." in said
    curve, said = run("precomputed", algo, *other, *PRECOMPUTE)
    assert COMPUTED in said
    assert "Loading actor ..." in said
    assert len(curve) == len(plain) > 3
    for here, there in zip(curve, plain, strict=True):
        machine = ("time/", "memory/", "engine/", "sync/", "tokens_per_s", "tflops", "mfu")
        names, others = ({name for name in row if not name.startswith(machine)} for row in (there, here))
        assert names == others
        assert [here[name] for name in names] == pytest.approx([there[name] for name in names], abs=1e-5)
    assert plain[0]["eval/loss"] != pytest.approx(plain[-1]["eval/loss"], abs=1e-3)  # it moved away from the reference


def test_they_are_kept_for_the_same_rows_and_model_only(run, pairs, tiny_model, tmp_path):
    def computed(name, *more):
        output = run(name, "dpo", "--train.batch-size", "6", *PRECOMPUTE, *more)[1]
        assert (COMPUTED in output) != (USED in output)
        return COMPUTED in output

    assert computed("first")
    assert not computed("again", "--seed", "3", "--train.batch-size", "4", "--actor.lr", "1e-3")
    assert computed("longer", "--data.max-tokens", "7")
    assert computed("template", "--data.template", "Q: {prompt}")
    assert not computed("temperature", "--rollout.temperature", "0.7")  # nothing is sampled
    other = shutil.copytree(tiny_model, tmp_path / "other")
    assert not computed("copy", "--reference.model", other)
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"][0] += 0.5
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    assert computed("byte", "--reference.model", other)
    pairs.write_text(pairs.read_text().replace('"8"', '"9"'))
    assert computed("row")


@pytest.mark.parametrize("flag", ["--reference.model", "--actor.adapter"])
def test_an_adapter_is_part_of_the_model(run, tmp_path, flag):
    lora = ("--actor.lora.rank", "4", "--checkpoint.final", "true")
    for seed, name in enumerate(("one", "two")):
        run(name, "dpo", *lora, "--seed", str(seed))
    of = {name: (flag, tmp_path / name / "model") for name in ("one", "two")}
    plain, _ = run("plain", "dpo", *of["one"])
    curve, said = run("first", "dpo", *of["one"], *PRECOMPUTE)
    assert COMPUTED in said
    assert curve[-1]["eval/loss"] == pytest.approx(plain[-1]["eval/loss"], abs=1e-5)
    assert USED in run("again", "dpo", *of["one"], *PRECOMPUTE)[1]
    assert COMPUTED in run("other", "dpo", *of["two"], *PRECOMPUTE)[1]


def test_rows_made_of_batches_are_kept_for_the_same_order_only(run):
    assert COMPUTED in run("first", "kto", *PRECOMPUTE)[1]
    assert USED in run("again", "kto", "--actor.lr", "1e-3", *PRECOMPUTE)[1]
    assert COMPUTED in run("order", "kto", "--seed", "1", *PRECOMPUTE)[1]


def test_a_row_that_was_not_there_is_an_error_and_no_other_rows_numbers(run, rlhf_here, tmp_path, monkeypatch):
    run("first", "dpo", *PRECOMPUTE)
    monkeypatch.setattr(stored_logprobs, "_digest", lambda prompt, completion, images: (7, 7))
    with pytest.raises(AssertionError, match=r"a row of step 0 was not there when log-probabilities were computed .* remove"):
        run("again", "dpo", *PRECOMPUTE)


@pytest.mark.parametrize("file", ["index.npy", "values", "hashes.json"])
@pytest.mark.parametrize("cut", [2, 4, 1000], ids=["half a number", "a number", "most"])
def test_damaged_files_are_written_anew(run, tmp_path, file, cut):
    run("first", "dpo", *PRECOMPUTE)
    (path,) = tmp_path.glob(f"cache/logprobs-*/*/{file}")
    path.write_bytes(path.read_bytes()[:-cut])
    assert COMPUTED in run("again", "dpo", *PRECOMPUTE)[1]
    assert USED in run("once more", "dpo", *PRECOMPUTE)[1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--algo", "dpo", "--actor.precompute", "true"), "the role 'actor' is trained, so its log-probabilities cannot be"),
        (("--algo", "rloo", "--reward", "vowels", "--kl.coef", "0.1", *PRECOMPUTE), "the run samples the rows that the role"),
    ],
)
def test_what_cannot_be_known_before_is_refused(rlhf_here, tiny_model, pairs, flags, message):
    result = rlhf_here("train", "--actor.model", tiny_model, "--data", pairs, *flags)
    assert result.exit_code == 2
    assert message in result.output
