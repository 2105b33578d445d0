"""Pictures from data to the trainer, into files, and back: with a tiny model that sees."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from ..conftest import read_jsonl
from ..seeing import noise, qwen

REWARD = """
def reward(completion, label):
    return sum(letter in "aeiou" for letter in completion) / 4
"""
LEARNED = ("loss", "grad_norm", "reward/mean", "mismatch/mean", "clip_fraction", "entropy")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    qwen(folder / "model")
    (folder / "data").mkdir()
    for number, size in enumerate([(56, 42), (28, 28), (70, 28)]):
        noise(folder / f"data/{number}.png", size, number)
    rows = [{"prompt": "which", "images": [f"{number}.png"], "answer": "r"} for number in range(3)]
    (folder / "data/rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "judge.py").write_text(REWARD)
    return folder


@pytest.fixture(scope="module")
def train(place, rlhf):
    def run(name: str, *flags: str | Path, code: int = 0):
        flags = (*flags, "--train.steps", "2", "--rollout.max-new-tokens", "4", "--actor.lr", "1e-2", "--train.threads", "1")
        common = ("--algo", "grpo", "--trajectories.tokens", "--run-dir", place / name)
        if "--actor.model" not in flags:
            flags = ("--actor.model", place / "model", *flags)
        return rlhf.run("train", *common, *flags, code=code)

    return run


@pytest.fixture(scope="module")
def sampled(place, train) -> Path:
    judge = ("--reward", f"{place / 'judge.py'}:reward")
    done = train("run", "--data", place / "data/rows.jsonl", *judge, "--train.batch-size", "3", "--rollout.n", "4")
    (place / "shown.txt").write_text(done.stdout)
    return place / "run"


def learned(run: Path) -> list[dict[str, float]]:
    return [{name: row[name] for name in LEARNED if name in row} for row in read_jsonl(run / "metrics.jsonl")]


def test_saved_pictures_train_as_sampled_ones_did(place, train, sampled):
    train("saved", "--from-trajectories", sampled)
    assert learned(place / "saved") == learned(sampled)
    assert len(learned(sampled)) == 2
    assert len(list((sampled / "trajectories/pictures").iterdir())) == 3


def test_the_console_names_a_picture_once(place, sampled):
    shown = (place / "shown.txt").read_text()
    assert re.search(r"train sample: prompt='.*\[picture (56×42|28×28|70×28)\].*w h i c h", shown)
    assert "image_pad" not in shown


def test_replayed_trajectories_keep_them(place, train, sampled, rlhf):
    output = place / "elsewhere/scored.jsonl"
    rlhf.run("replay", sampled, "--reward", f"{place / 'judge.py'}:reward", "--output", output)
    train("replayed", "--from-trajectories", output)
    assert learned(place / "replayed") == learned(sampled)
    shutil.rmtree(place / "elsewhere/pictures")
    refused = train("incomplete", "--from-trajectories", output, code=2)
    assert f"{output}:1: {place}/elsewhere/pictures/" in refused.stderr
    assert "cannot be read any more" in refused.stderr


def test_a_model_that_sees_nothing_is_refused(place, train, sampled):
    blind = place / "blind"
    shutil.copytree(place / "model", blind, ignore=shutil.ignore_patterns("*config.json", "*.safetensors"))
    shutil.copy(place / "model/tokenizer_config.json", blind)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=100, **sizes)).save_pretrained(blind)
    refused = train("refused", "--from-trajectories", sampled, "--actor.model", blind, code=2)
    assert "LlamaForCausalLM takes no pictures" in refused.stderr


def test_generated_answers_are_data_with_pictures(place, rlhf, sampled):
    output = place / "best/best.jsonl"
    common = ("--actor.model", place / "model", "--reward", f"{place / 'judge.py'}:reward", "--train.threads", "1")
    rlhf.run("generate", *common, "--data", place / "data/rows.jsonl", "--rollout.max-new-tokens", "40", "--output", output)
    shutil.move(place / "best", place / "moved")
    rows = [json.loads(line) for line in (place / "moved/best.jsonl").read_text().splitlines()]
    files = [place / "moved" / row["prompt"][0]["content"][0]["image"] for row in rows]
    assert files
    originals = {(place / f"data/{number}.png").read_bytes() for number in range(3)}
    assert {file.read_bytes() for file in files} <= originals
    rlhf.run("train", "--algo", "sft", "--data", place / "moved/best.jsonl", *common[:2], "--dry-run")
