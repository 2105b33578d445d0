"""Seconds per RL step against TRL's GRPOTrainer: same weights, prompts, batch, lengths, hardware and threads, in turn.

    python benchmarks/step_vs_trl.py --peer-python PATH [--rounds 3] [--kernels auto --kernels none] [--json]
    python benchmarks/step_vs_trl.py --peer-python PATH --case tiny-fixed --case tiny-ragged
    python benchmarks/step_vs_trl.py --peer-python PATH --runtime ray
    python benchmarks/step_vs_trl.py --peer-python PATH --device cuda --case 1b --vllm    # both sample with vLLM; TRL's with Liger

``PATH`` is the Python of an environment with ``torch`` and ``trl``. ``smollm2`` takes ``models/SmolLM2-135M-Instruct`` (``make
smollm2``) with GSM8K prompts (4 prompts × 8 samples × 64 tokens); ``tiny-*`` make a 0.6M-parameter Llama (16 × 8 × 32), ``1b`` one
of 1.1B (16 × 8 × 256); ``smoke`` only shows that it runs. Both sides
compute a reward that counts sevens. A step is all its work but the writing of its metrics (TRL's: from ``on_step_begin`` to
``on_step_end``; ours: ``time/step``); each run's first step is left out.
With ``--json`` the last line is one object: ``ratio`` (TRL's seconds over ours, the smallest of the cases run) and ``cases``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from both_sides import ROOT, flags, matmul_gflops, run_ours, run_peer


@dataclass(frozen=True)
class Case:
    prompts: int
    samples: int
    new_tokens: int
    steps: int
    ragged: bool
    model: str | None = None
    size: tuple[int, int, int] = (128, 4, 4)
    """Width, blocks and heads of the model that is made."""


CASES = {
    "tiny-fixed": Case(16, 8, 32, 12, ragged=False),
    "tiny-ragged": Case(16, 8, 32, 12, ragged=True),
    "smoke": Case(2, 2, 4, 2, ragged=False, size=(128, 2, 4)),
    "1b": Case(16, 8, 256, 5, ragged=False, size=(2048, 28, 16)),
    "smollm2": Case(4, 8, 64, 3, ragged=False, model="models/SmolLM2-135M-Instruct"),
}

RUNTIMES = {
    "local": [],
    "ray": ["--backend", "torch", "--engine", "transformers"],
    "ray-deepspeed": ["--backend", "deepspeed", "--backend.zero-stage", "2", "--engine", "transformers"],
    "ray-vllm": ["--backend", "torch", "--engine", "vllm"],
    "ray-deepspeed-vllm": ["--backend", "deepspeed", "--backend.zero-stage", "2", "--engine", "vllm"],
}
"""Name → flags, without those that follow from the number of threads."""

REWARD = '''"""Counts sevens."""
from pydantic import BaseModel
from rlhf_host import hookimpl

class Sevens:
    class Options(BaseModel):
        length: int
    def __init__(self, options):
        self.options = options
    @hookimpl
    def score(self, trajectories):
        return [t.text.count("7") / self.options.length for t in trajectories]
'''


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", required=True, help="Python of an environment with torch and trl")
    parser.add_argument("--case", action="append", choices=sorted(CASES), help="default: smollm2")
    parser.add_argument(
        "--kernels", action="append", help="ours: auto (the default), none for the plain path, or NAME; repeatable"
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side, in turn")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--model", help="model directory for the case smollm2")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: bfloat16 autocast on both sides")
    parser.add_argument("--runtime", choices=RUNTIMES, default="local", help="ours; ray: torch and transformers in Ray actors")
    parser.add_argument(
        "--vllm", action="store_true", help="both sides sample with vLLM on the trainer's device; local runtime"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    peak = matmul_gflops(options.threads)
    print(f"{options.threads} threads; fp32 matrix products reach {peak:.0f} GFLOP/s here")
    results = {}
    for name in options.case or ["smollm2"]:
        with tempfile.TemporaryDirectory() as folder:
            results[name] = compare(name, CASES[name], Path(folder), options, peak)
    if options.json:
        print(json.dumps({"ratio": min(result["ratio"] for result in results.values()), "cases": results}))


def compare(name: str, case: Case, folder: Path, options: argparse.Namespace, peak: float) -> dict[str, Any]:
    inputs = prepare(case, folder, options.model)
    peers: list[float] = []
    rows: dict[str, list[dict[str, float]]] = {kernels: [] for kernels in options.kernels or ["auto"]}
    ours: dict[str, list[float]] = {kernels: [] for kernels in rows}
    for number in range(options.rounds):
        peers.append(peer_seconds(case, inputs, options))
        for kernels in rows:
            steps = our_steps(case, inputs, folder / f"run-{number}-{kernels}", options, kernels)
            ours[kernels].append(statistics.median(row["time/step"] for row in steps))
            rows[kernels] += steps
            mine = ours[kernels][-1]
            print(
                f"{name} round {number + 1}: TRL {peers[-1]:.3f} s, rlhf-host (kernels {kernels}) {mine:.3f} s,"
                f" ratio {peers[-1] / mine:.2f}",
                flush=True,
            )
    theirs, results = statistics.median(peers), {}
    for kernels, steps in rows.items():
        mine = statistics.median(ours[kernels])
        print(f"{name}: TRL {theirs:.3f} s, rlhf-host (kernels {kernels}) {mine:.3f} s per step: ratio {theirs / mine:.2f}")
        middle = {key: statistics.median(row.get(key, 0.0) for row in steps) for key in steps[-1]}
        explain(case, inputs, middle, peak)
        results[kernels] = {
            "ratio": round(theirs / mine, 3),
            "ours_s": [round(value, 4) for value in ours[kernels]],
            "phases_s": {key: round(value, 4) for key, value in middle.items() if key.startswith("time/")},
        }
    ratio = min(result["ratio"] for result in results.values())
    return {"ratio": ratio, "trl_s": [round(value, 4) for value in peers], "kernels": results}


def explain(case: Case, inputs: dict[str, Any], row: dict[str, float], peak: float) -> None:
    """Seconds per phase, and how far each is from the speed of plain matrix products."""
    weights, tokens = inputs["parameters"], row["tokens"]
    prompt = inputs["prompt_tokens"]
    sampled = 2 * weights * (tokens + case.prompts * prompt) / 1e9
    shared = row.get("train/tokens") or (case.prompts * prompt + tokens)
    trained = 6 * weights * shared / 1e9
    for phase, work, bound in (
        ("rollout", sampled, f"{case.new_tokens} decoding steps one after the other: memory bandwidth and call overhead"),
        ("train", trained, "matrix products, forward and backward, prompts shared within a group"),
    ):
        seconds = row[f"time/{phase}"]
        speed = work / seconds
        print(
            f"  {phase:<10} {seconds:.3f} s  {work:.1f} GFLOP, {speed:.0f} GFLOP/s, {speed / peak:.0%} of the floor ({bound})"
        )
    for phase in ("logprobs", "advantages", "sync", "log", "host"):
        note = "  (all that is no model work)" if phase == "host" else ""
        print(f"  {phase:<10} {row.get(f'time/{phase}', 0.0):.3f} s{note}")


def our_steps(
    case: Case, inputs: dict[str, Any], run_dir: Path, options: argparse.Namespace, kernels: str = "auto"
) -> list[dict[str, float]]:
    """The rows of ``metrics.jsonl`` without the first step's."""
    runtime, threads, device = options.runtime, options.threads, options.device
    each = threads if runtime == "local" else 1
    settings = {
        "algo": "rloo",
        "reward": "sevens",
        "reward.sevens.length": case.new_tokens,
        "actor.model": inputs["ours"],
        "actor.lr": 1e-4,
        "data": inputs["data"],
        "rollout.n": case.samples,
        "rollout.max-new-tokens": case.new_tokens,
        "train.batch-size": case.prompts,
        "train.steps": case.steps,
        "train.threads": each,
        "actor.device": device,
        "kernels": kernels,
        "checkpoint.final": "false",
    }
    arguments = [*flags(settings), *RUNTIMES[runtime]]
    if options.vllm:
        arguments += ["--engine", "vllm", "--engine.gpu-memory-utilization", "0.3"]
    if runtime != "local":
        arguments += ["--runtime", "ray", "--ray.num-cpus", str(2 * threads), "--ray.object-store-mb", "200"]
        arguments += ["--placement", f"actor={threads}", "--placement", f"rollout={threads}"]
        arguments += ["--ray.num-gpus", "0"] if device == "cpu" else []
    return run_ours(arguments, run_dir, each, [inputs["plugin"]])[1:]


def peer_seconds(case: Case, inputs: dict[str, Any], options: argparse.Namespace) -> float:
    settings = {
        "model": inputs["peer"],
        "data": inputs["data"],
        "prompts": case.prompts,
        "samples": case.samples,
        "new-tokens": case.new_tokens,
        "steps": case.steps,
        "device": options.device,
    }
    arguments = flags(settings) + ["--ragged"] * case.ragged + ["--vllm"] * options.vllm
    return statistics.median(run_peer(options.peer_python, "trl_peer.py", arguments, options.threads)["seconds"])


def prepare(case: Case, folder: Path, model: str | None) -> dict[str, Any]:
    """Model directories for both sides, prompts, and the reward plugin."""
    from rlhf_authoring.models import write_tiny_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    peer = folder / "model"
    if case.model:
        peer = Path(model or ROOT / case.model)
        if not (peer / "config.json").exists():
            sys.exit(f"{peer} is not there: run `make smollm2`, or give --model DIR")
        rows = [json.loads(line) for line in (ROOT / "examples/data/gsm8k_sample.jsonl").read_text().splitlines()]
        prompts = [row["question"] for row in rows][: case.prompts * case.steps]
    else:
        hidden, layers, heads = case.size
        write_tiny_model(peer, hidden=hidden, layers=layers, heads=heads)
        dice = random.Random(0)
        prompts = ["".join(dice.choices("0123456789", k=8)) for _ in range(case.prompts * case.steps)]
    data = folder / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": prompt, "label": "7"}) + "\n" for prompt in prompts))
    loaded = AutoModelForCausalLM.from_pretrained(peer)
    tokenizer = AutoTokenizer.from_pretrained(peer)
    ours = peer
    if not case.ragged:
        # TRL's min_new_tokens forbids the end token; here the same weights simply have none.
        ours = folder / "endless"
        loaded.generation_config.eos_token_id = None
        loaded.save_pretrained(ours)
        template, tokenizer.eos_token = tokenizer.chat_template, None
        tokenizer.chat_template = template
        tokenizer.save_pretrained(ours)
    plugin = folder / "plugin"
    about = plugin / "bench_rewards-1.dist-info"
    about.mkdir(parents=True)
    (plugin / "bench_rewards.py").write_text(REWARD)
    (about / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: bench-rewards\nVersion: 1\nRequires-Dist: rlhf-host>=0.10,<0.11\n"
    )
    (about / "entry_points.txt").write_text("[rlhf.rewards]\nsevens = bench_rewards:Sevens\n")
    (about / "RECORD").write_text("bench_rewards.py,,\n")
    lengths = [len(render(tokenizer, prompt)) for prompt in prompts]
    return {
        "peer": peer,
        "ours": ours,
        "data": data,
        "plugin": plugin,
        "parameters": sum(p.numel() for p in loaded.parameters()),
        "prompt_tokens": statistics.mean(lengths),
    }


def render(tokenizer: Any, prompt: str) -> list[int]:
    if not tokenizer.chat_template:
        return tokenizer(prompt)["input_ids"]
    text = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


if __name__ == "__main__":
    main()
