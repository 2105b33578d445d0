"""A student that learns from a teacher with another tokenizer, beside RLOO and beside SFT on the teacher's texts.

    python benchmarks/other_tokenizers.py                  # six variants, three seeds each: a quarter of an hour
    python benchmarks/other_tokenizers.py --seeds 0 --steps 20

The task is 100 sums in words, ``three plus nine is`` → ``twelve``. The teacher has tokens of whole words, as SentencePiece makes
them; the student has pieces of words, byte-level. Both are tiny random models that first learn by ``--algo sft``: the teacher the
sums, the student sums of which 70 % of the answers are wrong. Prints the share of right greedy answers as it learns.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import rlhf_host

WORDS = [
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
    *("ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen"),
]
SUMS = [(f"{WORDS[a]} plus {WORDS[b]} is", f" {WORDS[a + b]}") for a in range(10) for b in range(10)]
WRONG = 0.7
DRAWS = 50
EVERY = 10
OWN = {"own_tokens": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "RLOO, right answers": {"name": "rloo"},
    "SFT on the teacher's texts": {"name": "sft"},
    "GOLD, on the teacher's texts": {"name": "distill", "beta": 0.5, **OWN},
    "GOLD, on its own answers": {"name": "on_policy_distill", "signal": "full", "beta": 0.5, **OWN},
    "ULD, on its own answers": {"name": "on_policy_distill", "signal": "full", "across": "uld", **OWN},
    "samples, on its own answers": {"name": "on_policy_distill", **OWN},
}
ON_ROWS = ("sft", "distill")
LR = 1e-3


def right(text: str, label: str) -> float:
    """Returns 1 for the right word."""
    return float(text.strip() == label.strip())


def pieces() -> PreTrainedTokenizerFast:
    """Returns byte-level tokens: bytes and a few pieces of words."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=275, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator([prompt + answer for prompt, answer in SUMS], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", pad_token="<end>")


def whole_words() -> PreTrainedTokenizerFast:
    """Returns tokens of whole words, with their space before them, and bytes to fall back to."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    inner = Tokenizer(models.BPE(unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.train_from_iterator(
        [prompt + answer for prompt, answer in SUMS],
        trainers.BpeTrainer(vocab_size=500, special_tokens=["<unk>"], show_progress=False),
    )
    known = json.loads(inner.to_str())["model"]
    names += [token for token in known["vocab"] if token != "<unk>"]
    merges = [tuple(pair) for pair in known["merges"]]
    vocabulary = {token: number for number, token in enumerate(names)}
    inner = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens([AddedToken(token, special=True) for token in names[:3]])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<unk>"
    )


def write_model(directory: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    """Writes a random model for a tokenizer."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def accuracy(model: Path) -> float:
    """Returns the share of right greedy answers over all sums, by transformers alone."""
    return sum(text.strip() == answer.strip() for text, (_, answer) in zip(answers(model), SUMS, strict=True)) / len(SUMS)


def answers(model: Path) -> list[str]:
    """Returns the greedy answer to each sum."""
    tokenizer, network = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    found = []
    for prompt, _ in SUMS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.no_grad():
            out = network.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=tokenizer.pad_token_id)
        found.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    return found


def learnt(out: Path, name: str, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]], steps: int) -> Path:
    """Returns a model that has learnt the rows, trained by the first call."""
    run = out / name
    if not (run / "model").is_dir():
        model = write_model(out / f"{name}-new", tokenizer)
        settings = {"train.threads": 1, "eval.at_end": False, "checkpoint.every": 0}
        rlhf_host.train(algo="sft", model=model, data=rows, run_dir=str(run), steps=steps, batch_size=50, lr=3e-3, **settings)
    return run / "model"


def prepared(out: Path) -> tuple[Path, Path]:
    """Returns the teacher and the student as it begins."""
    draw = random.Random(0)
    rows = [{"prompt": prompt, "completion": answer} for prompt, answer in SUMS]
    mixed = [{**row, "completion": f" {draw.choice(WORDS)}"} if draw.random() < WRONG else row for row in rows * DRAWS]
    return learnt(out, "teacher", whole_words(), rows, 300), learnt(out, "student", pieces(), mixed, 400)


def curve(out: Path, name: str, teacher: Path, student: Path, texts: Sequence[str], seed: int, steps: int) -> list[float]:
    """Returns the accuracy after every ``EVERY`` steps."""
    algo = {**VARIANTS[name]}
    label = name.replace(",", "").replace("'", "").replace(" ", "-")
    run = out / f"{label}-{steps}-{seed}"
    if not (run / "model").is_dir():
        own = {"train.threads": 1, "eval.at_end": False, "checkpoint.every": EVERY, "checkpoint.keep": steps}
        own |= {"roles.teacher.model": str(teacher)} if algo.get("own_tokens") else {}
        if algo["name"] in ON_ROWS:
            own["data"] = [{"prompt": prompt, "completion": text} for (prompt, _), text in zip(SUMS, texts, strict=True)]
            own["batch_size"] = 100
        else:
            own |= {"data": [{"prompt": prompt, "label": answer} for prompt, answer in SUMS], "n": 4, "max_new_tokens": 8}
            own |= {"batch_size": 25}
        if algo["name"] == "rloo":
            own["rewards"] = right
        rlhf_host.train(algo=algo, model=student, run_dir=str(run), steps=steps, lr=LR, seed=seed, **own)
    saved = sorted((run / "checkpoints").glob("step-*/model"))
    return [accuracy(student), *map(accuracy, saved)]


def table(out: Path, seeds: Sequence[int], steps: int) -> None:
    """Prints the median curve of each variant in Markdown, with the lowest and highest end."""
    teacher, student = prepared(out)
    texts = answers(teacher)
    print(f"teacher {accuracy(teacher):.2f}, student {accuracy(student):.2f}", flush=True)
    print(f"| | {' | '.join(f'step {step}' for step in range(0, steps + 1, EVERY))} | ends |")
    print("|---" * (steps // EVERY + 3) + "|", flush=True)
    for name in VARIANTS:
        curves = [curve(out, name, teacher, student, texts, seed, steps) for seed in seeds]
        medians = " | ".join(f"{statistics.median(values):.2f}" for values in zip(*curves, strict=True))
        ends = [values[-1] for values in curves]
        print(f"| {name} | {medians} | {min(ends):.2f} to {max(ends):.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("runs/other-tokenizers"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    table(options.out, options.seeds, options.steps)


if __name__ == "__main__":
    main()
