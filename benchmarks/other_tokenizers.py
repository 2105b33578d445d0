"""A student that learns from a teacher with another tokenizer, beside RLOO and beside SFT on the teacher's texts.

    python benchmarks/other_tokenizers.py                       # seven variants, three seeds each: six minutes
    python benchmarks/other_tokenizers.py --teacher words       # a teacher that shares no token of an answer
    python benchmarks/other_tokenizers.py --seeds 0 --steps 20

The task is 100 sums in words, ``three plus nine is`` → ``twelve``. The student has byte-level pieces of words. The teacher has
pieces too, of another text and as SentencePiece makes them, or whole words. Both are tiny random models that first learn by
``--algo sft``: the teacher the sums, the student sums of which 70 % of the answers are drawn at random. Prints how many tokens
of the answers both have, and the probability of the right answer, a mean over all sums, as it learns.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Sequence
from itertools import pairwise
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
TEACHERS = {"pieces": 40, "words": 500}
"""Sizes of vocabularies, beside bytes."""
EVERY = 10
OWN = {"own_tokens": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "RLOO, right answers": {"name": "rloo"},
    "SFT on the teacher's texts": {"name": "sft"},
    "ULD, on the teacher's texts, with their likelihood": {"name": "distill", "across": "uld", "alpha": 0.6, **OWN},
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


def sentence_pieces(vocabulary_size: int) -> PreTrainedTokenizerFast:
    """Returns tokens with their space before them, of at most so many kinds, and bytes to fall back to."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    inner = Tokenizer(models.BPE(unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.train_from_iterator(
        [answer + prompt for prompt, answer in SUMS],
        trainers.BpeTrainer(vocab_size=vocabulary_size, special_tokens=["<unk>"], show_progress=False),
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


def likelihood(model: Path) -> float:
    """Returns the mean probability of the right answer and its end over all sums, by transformers alone."""
    tokenizer, network = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    found = []
    for prompt, answer in SUMS:
        begin, whole = tokenizer(prompt).input_ids, tokenizer(prompt + answer).input_ids
        assert whole[: len(begin)] == begin
        ids = torch.tensor([[*whole, tokenizer.eos_token_id]])
        with torch.no_grad():
            logs = network(ids).logits[0, len(begin) - 1 : -1].log_softmax(-1)
        found.append(float(logs.gather(-1, ids[0, len(begin) :, None]).sum().exp()))
    return statistics.fmean(found)


def answers(model: Path) -> list[str]:
    """Returns the greedy answer to each sum."""
    tokenizer, network = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    found = []
    for prompt, _ in SUMS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.no_grad():
            out = network.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=tokenizer.pad_token_id)
        found.append(tokenizer.decode(out[0], skip_special_tokens=True).removeprefix(prompt))
    return found


def shared(teacher: Path, student: Path) -> float:
    """Returns the share of the student's tokens of the answers that are tokens of the teacher there."""
    cuts = []
    for model in (teacher, student):
        tokenizer = AutoTokenizer.from_pretrained(model)
        ends = []
        for prompt, answer in SUMS:
            ids = tokenizer(prompt + answer).input_ids
            sizes = [len(tokenizer.decode(ids[:place], skip_special_tokens=True)) for place in range(len(ids) + 1)]
            ends.append([pair for pair in pairwise(sizes) if pair[0] >= len(prompt) < pair[1]])
        cuts.append(ends)
    both = [(len({*theirs} & {*own}), len(own)) for theirs, own in zip(*cuts, strict=True)]
    return sum(common for common, _ in both) / sum(all_of for _, all_of in both)


def learnt(out: Path, name: str, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]], steps: int) -> Path:
    """Returns a model that has learnt the rows, trained by the first call."""
    run = out / name
    if not (run / "model").is_dir():
        model = write_model(out / f"{name}-new", tokenizer)
        settings = {"train.threads": 1, "eval.at_end": False, "checkpoint.every": 0}
        rlhf_host.train(algo="sft", model=model, data=rows, run_dir=str(run), steps=steps, batch_size=50, lr=3e-3, **settings)
    return run / "model"


def prepared(out: Path, teacher: str) -> tuple[Path, Path]:
    """Returns the teacher and the student as it begins."""
    draw = random.Random(0)
    rows = [{"prompt": prompt, "completion": answer} for prompt, answer in SUMS]
    mixed = [{**row, "completion": f" {draw.choice(WORDS)}"} if draw.random() < WRONG else row for row in rows * DRAWS]
    tokens = sentence_pieces(TEACHERS[teacher])
    return learnt(out, f"teacher-{teacher}", tokens, rows, 300), learnt(out, "student", pieces(), mixed, 1500)


def curve(out: Path, name: str, teacher: Path, student: Path, texts: Sequence[str], seed: int, steps: int) -> list[float]:
    """Returns the likelihood after every ``EVERY`` steps."""
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
    return [likelihood(student), *map(likelihood, saved)]


def table(out: Path, which: str, seeds: Sequence[int], steps: int) -> None:
    """Prints the median curve of each variant in Markdown, with the lowest and highest end."""
    teacher, student = prepared(out, which)
    texts = answers(teacher)
    print(f"tokens of answers that both have: {shared(teacher, student):.2f}")
    print(f"teacher {likelihood(teacher):.2f}, student {likelihood(student):.2f}", flush=True)
    print(f"| | {' | '.join(f'step {step}' for step in range(0, steps + 1, EVERY))} | ends |")
    print("|---" * (steps // EVERY + 3) + "|", flush=True)
    for name in VARIANTS:
        curves = [curve(out / which, name, teacher, student, texts, seed, steps) for seed in seeds]
        medians = " | ".join(f"{statistics.median(values):.2f}" for values in zip(*curves, strict=True))
        ends = [values[-1] for values in curves]
        print(f"| {name} | {medians} | {min(ends):.2f} to {max(ends):.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--teacher", choices=list(TEACHERS), default="pieces")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("runs/other-tokenizers"))
    options = parser.parse_args()
    (options.out / options.teacher).mkdir(parents=True, exist_ok=True)
    table(options.out, options.teacher, options.seeds, options.steps)


if __name__ == "__main__":
    main()
