"""Algorithms that train on a data set, on the real command line and in several processes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from rlhf_host.config.schema import RoleConfig
from rlhf_host.models.loading import load_model
from rlhf_host.models.passes import Passes


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Questions with a right and a wrong answer."""
    rows = [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 1)} for a in range(3, 8) for b in range(2, 8)]
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def flags(tiny_model, pairs, tmp_path):
    """``flags(algo, ...)``: a command, which writes to ``tmp_path / "run"``."""

    def make(algo, *more, files=pairs):
        data = ["--data", files, "--eval.data", files, "--actor.model", tiny_model, "--train.batch-size", "8"]
        return ["train", "--algo", algo, *data, "--actor.lr", "1e-3", "--run-dir", tmp_path / "run", *more]

    return make


def curve(folder):
    return [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("algo", ["dpo", "ipo", "cdpo", "cpo", "kto", "rm"])
def test_pairs_are_learnt_and_what_comes_next_is_said(algo, rlhf_here, flags, tmp_path):
    result = rlhf_here(*flags(algo, "--data.epochs", "4"))
    assert result.exit_code == 0, result.output
    assert "30 pairs" in result.output or "60 rows" in result.output
    assert "trained tokens in ⟦⟧" in result.output
    assert "--data.epochs 8" in result.output
    assert "rlhf eval" not in result.output
    rows = curve(tmp_path)
    assert rows[-1]["eval/loss"] < rows[0]["eval/loss"]
    assert not any(name.startswith(("reward/", "mismatch/", "rollout/")) for row in rows for name in row)


def test_tpo_learns_triples_and_names_what_a_row_lacks(rlhf_here, flags, pairs, tmp_path):
    rows = [{**json.loads(line), "reference": "so " + json.loads(line)["chosen"]} for line in pairs.read_text().splitlines()]
    for name, kept in (("triples", rows), ("lacking", [*rows[:3], {**rows[3], "reference": None}, *rows[4:]])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    triples, lacking = tmp_path / "triples.jsonl", tmp_path / "lacking.jsonl"
    for file, message in (
        (pairs, "tpo needs triple data; this is preference"),
        (lacking, "lacking.jsonl:4: 'reference' must be a text, not null"),
    ):
        result = rlhf_here(*flags("tpo", files=file))
        assert result.exit_code == 2
        assert message in result.output
    assert not (tmp_path / "run").exists()
    result = rlhf_here(*flags("tpo", "--train.steps", "3", files=triples))
    assert result.exit_code == 0, result.output
    assert "30 triples" in result.output
    lines = curve(tmp_path)
    assert [line["step"] for line in lines if "loss/nll" in line] == [1, 2, 3]
    assert lines[-1]["eval/loss"] < lines[0]["eval/loss"]


def test_a_reward_model_scores_the_same_in_both_classes_of_transformers(rlhf_here, flags, tmp_path):
    result = rlhf_here(*flags("rm", "--data.epochs", "2"))
    assert result.exit_code == 0, result.output
    ids, places = torch.tensor([[7, 9, 12, 5, 2]]), torch.arange(5)
    sequence = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run/model")
    tokens, info = AutoModelForTokenClassification.from_pretrained(tmp_path / "run/model", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert sequence.config.num_labels == 1
    with torch.no_grad():
        score, each = sequence(ids).logits[0, 0], tokens(ids).logits[0, :, 0]
    assert score.abs() > 0
    pads = sequence.config.pad_token_id
    last = int(places[ids[0] != pads][-1]) if pads is not None else 4
    assert torch.allclose(score, each[last], atol=1e-6)


@pytest.mark.parametrize("lora", [[], ["--actor.lora.rank", "4"]], ids=["all", "adapter"])
def test_a_model_without_a_padding_token_gets_the_tokenizer_s(lora, rlhf_here, flags, tiny_model, tmp_path):
    """Else transformers would refuse batches, or read scores at another token once somebody sets one."""
    base, trained = tmp_path / "base", tmp_path / "run/model"
    shutil.copytree(tiny_model, base)
    for name, key in (("config.json", "pad_token_id"), ("tokenizer_config.json", "pad_token")):
        settings = json.loads((base / name).read_text())
        del settings[key]
        (base / name).write_text(json.dumps(settings))
    result = rlhf_here(*flags("rm", "--actor.model", base, *lora))
    assert result.exit_code == 0, result.output
    if lora:
        result = rlhf_here("merge-lora", trained, "--output", tmp_path / "merged")
        assert result.exit_code == 0, result.output
        trained = tmp_path / "merged"
    tokenizer, model = AutoTokenizer.from_pretrained(trained), AutoModelForSequenceClassification.from_pretrained(trained)
    assert model.config.pad_token_id == tokenizer.pad_token_id == tokenizer.eos_token_id
    rows = [tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for text in ("3+4=7", "5+6=11")]
    batch = tokenizer.pad({"input_ids": rows}, padding_side="right", return_tensors="pt")
    with torch.no_grad():
        whole = model(**batch).logits[:, 0]
        own = Passes(load_model(RoleConfig(model=str(tmp_path / "run/model")), head="scalar")).forward(
            [row[:3] for row in rows],
            pad_sequence([torch.tensor(row[3:]) for row in rows], batch_first=True),
            pad_sequence([torch.ones(len(row) - 3, dtype=torch.bool) for row in rows], batch_first=True),
            outputs=frozenset({"scores"}),
        )
    assert whole.abs().min() > 0
    torch.testing.assert_close(own.scores, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("more", [(), ("--reference.precompute", "true")], ids=["loaded", "precomputed"])
def test_two_ranks_under_ray_train_as_one_process_does(rlhf, flags, tmp_path, environment, more):
    rlhf = replace(rlhf, environment={**environment, "RLHF_CACHE": str(tmp_path / "cache")})
    one = rlhf.run(*flags("kto", "--kernels", "none"))
    alone = curve(tmp_path)
    (tmp_path / "run").rename(tmp_path / "alone")
    two = rlhf.run(*flags("kto", "--kernels", "none", "--runtime", "ray", "--placement", "actor+reference=2", *more))
    assert ("Loading actor, reference ..." in two.stderr) != bool(more)
    together = curve(tmp_path)
    assert len(together) == len(alone) == 9
    for here, there in zip(alone, together, strict=True):
        for name in ("loss", "grad_norm", "kl", "eval/loss", "eval/rewards/chosen"):
            assert (name in here) == (name in there)
            assert here.get(name) == pytest.approx(there.get(name), abs=1e-5), name
    weights = [AutoModelForCausalLM.from_pretrained(tmp_path / run / "model").state_dict() for run in ("alone", "run")]
    for name, tensor in weights[0].items():
        assert torch.allclose(tensor, weights[1][name], atol=1e-5), name
    assert "starting the engine" not in one.stderr


def test_a_run_that_samples_is_told_that_its_data_has_answers(rlhf_here, flags):
    result = rlhf_here(*flags("rloo", "--reward", "vowels", "--dry-run"))
    assert result.exit_code == 2
    assert "this is preference data, which algorithms that sample do not train on" in result.output


def test_the_wrong_data_is_refused_with_what_fits(rlhf_here, flags):
    result = rlhf_here(*flags("sft", "--dry-run"))
    assert result.exit_code == 2
    assert "sft needs prompt_completion data; this is preference" in result.output
