"""Training on a data set against TRL's trainers: 20 steps over the same tokens from the same weights have the same losses."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch
from rlhf_authoring.models import write_tiny_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import rlhf_host

from .conftest import _borrowed

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
STEPS, BATCH, LR = 20, 8, 1e-3


@pytest.fixture(scope="module")
def peer():
    """TRL's side of the benchmark."""
    with _borrowed("trl"):
        spec = importlib.util.spec_from_file_location("trl_offline_peer", BENCHMARKS / "trl_offline_peer.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A language model, and the same with a scalar head that is not 0."""
    folder = tmp_path_factory.mktemp("models")
    plain = write_tiny_model(folder / "lm", hidden=64)
    torch.manual_seed(1)
    scorer = AutoModelForSequenceClassification.from_pretrained(plain, num_labels=1)
    scorer.score.weight.data.normal_(0, 0.02)
    scorer.save_pretrained(folder / "rm")
    AutoTokenizer.from_pretrained(plain).save_pretrained(folder / "rm")
    return {"sft": plain, "dpo": plain, "kto": plain, "rm": folder / "rm"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Pairs of ragged lengths as text, and their tokens as each trainer of TRL takes them."""
    draw = torch.Generator().manual_seed(0)

    def text(low, high):
        places = torch.randint(0, 26, (int(torch.randint(low, high, (), generator=draw)),), generator=draw)
        return "".join(chr(ord("a") + place) for place in places.tolist())

    rows = [{"prompt": text(4, 30), "chosen": text(1, 40), "rejected": text(1, 40)} for _ in range(STEPS * BATCH)]
    path = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path, rows


def tokens(algo, rows, tokenizer):
    """Every text and an end token."""

    def ids(text, end=()):
        return [*tokenizer(text, add_special_tokens=False)["input_ids"], *end]

    end = [tokenizer.eos_token_id]
    made = [
        {"prompt_ids": ids(row["prompt"])} | {f"{key}_ids": ids(row[key], end) for key in ("chosen", "rejected")}
        for row in rows
    ]
    if algo == "sft":
        return [{"prompt_ids": row["prompt_ids"], "completion_ids": row["chosen_ids"]} for row in made]
    if algo == "kto":
        keys = (("chosen_ids", True), ("rejected_ids", False))
        single = [(row["prompt_ids"], row[key], label) for row in made for key, label in keys]
        return [{"prompt_ids": prompt, "completion_ids": ids, "label": label} for prompt, ids, label in single[: STEPS * BATCH]]
    return made


@pytest.mark.parametrize(("algo", "first"), [("sft", None), ("dpo", math.log(2)), ("kto", 0.5), ("rm", None)])
def test_twenty_steps_have_the_losses_of_trls_trainer(peer, models, data, tmp_path, algo, first):
    path, rows = data
    ids = tokens(algo, rows, AutoTokenizer.from_pretrained(models[algo]))
    theirs = peer.trainer(algo, models[algo], ids, batch=BATCH, per_device=BATCH, steps=STEPS, lr=LR)
    theirs.train()
    if algo == "sft":
        path = tmp_path / "tokens.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in ids))
    settings = {"actor.lr": LR, "actor.betas": (0.9, 0.999), "data.shuffle": False, "data.template": "none"}
    settings |= {"train.batch_size": BATCH, "train.steps": STEPS, "checkpoint.final": False}
    rlhf_host.train(algo=algo, model=models[algo], data=path, run_dir=tmp_path / "run", **settings)
    curve = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in curve if row["step"]]
    assert losses == pytest.approx(theirs.losses, abs=1e-5)
    assert len(losses) == STEPS
    assert first is None or losses[0] == pytest.approx(first, abs=1e-5)
    assert abs(losses[0] - losses[-1]) > 1e-3, "nothing was learnt, so nothing is compared"
