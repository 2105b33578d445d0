"""Seconds per step of training on a data set against TRL's trainers, and the losses of both: same weights, tokens, order, threads.

    python benchmarks/offline_vs_trl.py --peer-python PATH [--data pairs.jsonl] [--rounds 3] [--algo dpo --algo kto] [--json]
    python benchmarks/offline_vs_trl.py --peer-python PATH --case parity
    python benchmarks/offline_vs_trl.py --peer-python PATH --precomputed

``PATH`` is the Python of an environment with ``torch`` and ``trl``. ``smollm2`` takes ``models/SmolLM2-135M-Instruct`` (``make
smollm2``) with batches of 4 pairs or 8 rows; ``parity`` makes a Llama of two blocks with 4,096 tokens and takes 20 steps. Both
sides train in float32 with AdamW without decay, on rows of at most 256 tokens: TRL is given the tokens of ours. ``--data`` names
pairs in a format that ``rlhf train --algo dpo`` reads (default: GSM8K's questions, each with its own answer and another's);
``sft`` learns the chosen answers. TRL's trainers run with all rows of a step in one micro-batch, and with smaller ones that
accumulate. A step is all its work but the writing of its metrics; each run's first step is left out.
With ``--json`` the last line is one object: ``sft``, ``dpo``, ``kto``, ``rm`` (TRL's seconds at its best micro-batch over ours),
the same names with ``_same_batch`` (TRL's with one micro-batch), with ``_difference`` (the largest of the losses, TRL's with one
micro-batch) and, in ``seconds``, what was measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from both_sides import ROOT, flags, matmul_gflops, run_ours, run_peer

ALGORITHMS = ("sft", "dpo", "kto", "rm")
MAX_TOKENS = 256


@dataclass(frozen=True)
class Case:
    units: int
    """Rows, or half as many pairs, of a step."""
    steps: int
    lr: float
    model: str | None = None
    micro: tuple[int, ...] = (4, 2, 1)
    """TRL's micro-batches beside the whole step."""


CASES = {
    "smollm2": Case(8, 8, 1e-6, "models/SmolLM2-135M-Instruct"),
    "parity": Case(8, 20, 1e-3, micro=()),
    "smoke": Case(4, 2, 1e-3, micro=(2,)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", required=True, help="Python of an environment with torch and trl")
    parser.add_argument("--case", choices=sorted(CASES), default="smollm2")
    parser.add_argument("--algo", action="append", choices=ALGORITHMS, help="default: all")
    parser.add_argument("--data", help="pairs: a file or hub name")
    parser.add_argument("--model", help="model directory for the case smollm2")
    parser.add_argument("--steps", type=int, help="of each run")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side, in turn")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--kernels", default="auto", help="ours: auto, none for the plain path, or NAME")
    parser.add_argument(
        "--precomputed", action="store_true", help="the reference's log-probabilities before the steps, on both sides"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    print(f"{options.threads} threads; fp32 matrix products reach {matmul_gflops(options.threads):.0f} GFLOP/s here")
    with tempfile.TemporaryDirectory() as folder:
        results = compare(options, CASES[options.case], Path(folder))
    if options.json:
        print(json.dumps(results))


def compare(options: argparse.Namespace, case: Case, folder: Path) -> dict[str, Any]:
    steps = options.steps or case.steps
    data = options.data or write_pairs(folder / "pairs.jsonl")
    models = prepare_models(options.model, case, folder, data)
    tasks = [Task(algo, case, steps, models["rm" if algo == "rm" else "lm"], options) for algo in options.algo or ALGORITHMS]
    for task in tasks:
        task.prepare(data, folder)
    for number in range(options.rounds):
        for task in tasks:
            task.run(folder, number)
    results: dict[str, Any] = {"seconds": {}}
    for task in tasks:
        results |= task.result()
        results["seconds"][task.algo] = {"ours": task.ours, **{f"trl_{size}": each for size, each in task.theirs.items()}}
    return results


class Task:
    """One algorithm on both sides."""

    def __init__(self, algo: str, case: Case, steps: int, model: Path, options: argparse.Namespace):
        self.algo, self.case, self.steps, self.model, self.options = algo, case, steps, model, options
        self.batch = case.units // 2 if algo in ("dpo", "rm") else case.units
        least = 2 if algo == "kto" else 1  # TRL refuses kto with one row
        self.sizes = [self.batch, *(size for size in case.micro if least <= size < self.batch)]
        self.ours: list[float] = []
        self.theirs: dict[int, list[float]] = {size: [] for size in self.sizes}
        self.difference = 0.0

    def prepare(self, data: str | Path, folder: Path) -> None:
        """Our data, and the tokens of the steps for TRL."""
        rows = list(token_rows(self.algo, data, self.model, self.batch * self.steps))
        self.rows = folder / f"{self.algo}.jsonl"
        self.rows.write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.data = self.rows if self.algo == "sft" else data

    def run(self, folder: Path, number: int) -> None:
        """A round: TRL with every micro-batch, then ours."""
        losses: dict[int, list[float]] = {}
        for size in self.sizes:
            seconds, losses[size] = self._peer(size)
            self.theirs[size].append(statistics.median(seconds))
        steps = self._own(folder / f"{self.algo}-{number}")
        self.ours.append(statistics.median(row["time/step"] for row in steps[1:] or steps))
        pairs = list(zip((row["loss"] for row in steps), losses[self.batch], strict=True))
        self.difference = max(self.difference, *(abs(mine - other) for mine, other in pairs))
        trl = ", ".join(f"{size} × {self.batch // size}: {each[-1]:.3f} s" for size, each in self.theirs.items())
        ends = ", ".join(f"{mine:.6f} / {other:.6f}" for mine, other in (pairs[0], pairs[-1]))
        print(f"{self.algo} round {number + 1}: rlhf-host {self.ours[-1]:.3f} s, TRL {trl}", flush=True)
        print(f"  losses of the first and last step, ours / TRL: {ends}; largest difference {self.difference:.1e}", flush=True)

    def _peer(self, size: int) -> tuple[list[float], list[float]]:
        settings = {
            "algo": self.algo,
            "model": self.model,
            "rows": self.rows,
            "batch": self.batch,
            "per-device": size,
            "steps": self.steps,
            "lr": self.case.lr,
        }
        arguments = flags(settings) + ["--precomputed"] * self._precomputed
        said = run_peer(self.options.peer_python, "trl_offline_peer.py", arguments, self.options.threads)
        return said["seconds"][1:] or said["seconds"], said["losses"]

    def _own(self, run_dir: Path) -> list[dict[str, float]]:
        settings = {
            "algo": self.algo,
            "actor.model": self.model,
            "actor.lr": self.case.lr,
            "actor.betas": "[0.9, 0.999]",
            "actor.device": "cpu",
            "data": self.data,
            "data.max-tokens": MAX_TOKENS,
            "data.on-bad-row": "skip",
            "data.shuffle": "false",
            "train.batch-size": self.batch,
            "train.steps": self.steps,
            "train.threads": self.options.threads,
            "kernels": self.options.kernels,
            "checkpoint.final": "false",
        }
        arguments = flags(settings) + ["--reference.precompute", "true"] * self._precomputed
        return run_ours(arguments, run_dir, self.options.threads)

    @property
    def _precomputed(self) -> bool:
        return self.options.precomputed and self.algo in ("dpo", "kto")

    def result(self) -> dict[str, float]:
        ours = statistics.median(self.ours)
        theirs = {size: statistics.median(each) for size, each in self.theirs.items()}
        best = min(theirs, key=lambda size: theirs[size])
        ratio, same = theirs[best] / ours, theirs[self.batch] / ours
        print(f"{self.algo}: {ratio:.2f} × as fast as TRL at its best micro-batch ({best}), {same:.2f} × at {self.batch}")
        named = {"": ratio, "_same_batch": same, "_difference": self.difference}
        return {f"{self.algo}{name}": float(f"{value:.3g}") for name, value in named.items()}


# --- what both sides get ----------------------------------------------------------------------------------------------


def token_rows(algo: str, data: str | Path, model: Path, count: int) -> Iterator[dict[str, Any]]:
    """The tokens of the first units as ``rlhf train`` reads them. ``sft``: of the pairs' chosen rows."""
    from rlhf_rows.load_units import load_units

    from rlhf_host.config.schema import DataConfig, RoleConfig
    from rlhf_host.models.loading import load_tokenizer, sizes, stop_tokens

    role = RoleConfig(model=str(model))
    units = load_units(
        DataConfig(sources=[{"path": str(data)}], max_tokens=MAX_TOKENS, on_bad_row="skip"),
        kind="unpaired" if algo == "kto" else "preference",
        split="train",
        tokenizer=load_tokenizer(role),
        max_tokens=sizes(role)[1],
        stop_ids=stop_tokens(role),
    )
    (own,) = units.sources.values()
    if len(own) < count:
        sys.exit(f"{data} has {len(own)} units of at most {MAX_TOKENS} tokens, and {algo} needs {count}")
    for unit in own[:count]:
        prompt, completions = list(unit.rows[0].prompt_ids), [list(row.completion_ids) for row in unit.rows]
        if algo == "sft":
            yield {"prompt_ids": prompt, "completion_ids": completions[0]}
        elif algo == "kto":
            yield {"prompt_ids": prompt, "completion_ids": completions[0], "label": unit.rows[0].columns["label"]}
        else:
            yield {"prompt_ids": prompt, "chosen_ids": completions[0], "rejected_ids": completions[1]}


def write_pairs(path: Path) -> Path:
    """GSM8K's questions; another question's answer is the rejected one."""
    rows = [json.loads(line) for line in (ROOT / "examples/data/gsm8k_sample.jsonl").read_text().splitlines()]
    pairs = [
        {"prompt": row["question"], "chosen": row["answer"], "rejected": other["answer"]}
        for row, other in zip(rows, rows[1:] + rows[:1], strict=True)
    ]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return path


def prepare_models(model: str | None, case: Case, folder: Path, data: str | Path) -> dict[str, Path]:
    """``lm``, and ``rm``: the same with a scalar head."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, logging

    logging.set_verbosity_error()  # the head is new, as intended
    if case.model:
        path = Path(model or ROOT / case.model)
        if not (path / "config.json").exists():
            sys.exit(f"{path} is not there: run `make smollm2`, or give --model DIR")
    else:
        path = small_model(folder / "model", data)
    torch.manual_seed(1)
    scorer = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, dtype=torch.float32)
    scorer.save_pretrained(folder / "scorer")
    AutoTokenizer.from_pretrained(path).save_pretrained(folder / "scorer")
    return {"lm": path, "rm": folder / "scorer"}


def small_model(path: Path, data: str | Path) -> Path:
    """A random Llama of two blocks, and a tokenizer of 4,096 byte pairs learnt from the data."""
    import torch
    from tokenizers import ByteLevelBPETokenizer
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    inner = ByteLevelBPETokenizer()
    inner.train([str(data)], vocab_size=4096, special_tokens=["<pad>", "<bos>", "<eos>"], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner._tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


if __name__ == "__main__":
    main()
