"""Seconds per RL step against TRL's GRPOTrainer: same weights, prompts, batch, lengths, hardware and threads, in turn.

    python benchmarks/step_vs_trl.py --peer-python PATH [--rounds 3] [--kernels auto --kernels none] [--json]
    python benchmarks/step_vs_trl.py --peer-python PATH --case tiny-fixed --case tiny-ragged
    python benchmarks/step_vs_trl.py --peer-python PATH --runtime ray
    python benchmarks/step_vs_trl.py --peer-python PATH --device cuda --case 1b --continuous-batching --liger
    python benchmarks/step_vs_trl.py --peer-python PATH --device cuda --case 1b --vllm --liger    # both sides sample with vLLM

``PATH`` is the Python of an environment with ``torch`` and ``trl``. ``smollm2`` takes ``models/SmolLM2-135M-Instruct`` (``make
smollm2``) with GSM8K prompts (4 prompts × 8 samples × 64 tokens); ``tiny-*`` make a 0.6M-parameter Llama (16 × 8 × 32), ``1b`` one
of 1.1B (16 × 8 × 256), ``1b-prompts`` the same with prompts of 512 tokens and answers of 16, so that decoding is the smaller part
of a step; ``smoke`` only shows that it runs. Both sides
compute a reward that counts sevens. A step is all its work but the writing of its metrics (TRL's: from ``on_step_begin`` to
``on_step_end``; ours: ``time/step``); each run's first step is left out.
With ``--json`` the last line is one object: ``ratio`` (TRL's seconds over ours, the smallest of the cases run) and ``cases``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
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
    prompt: int = 8
    """Tokens of a prompt that is made, without a chat template."""
    half: bool = False
    """The files of the model that is made are in bfloat16. Both sides train in float32 all the same."""


CASES = {
    "tiny-fixed": Case(16, 8, 32, 12, ragged=False),
    "tiny-ragged": Case(16, 8, 32, 12, ragged=True),
    "smoke": Case(2, 2, 4, 2, ragged=False, size=(128, 2, 4)),
    "1b": Case(16, 8, 256, 5, ragged=False, size=(2048, 28, 16), half=True),
    "1b-prompts": Case(4, 8, 16, 5, ragged=False, size=(2048, 28, 16), prompt=512, half=True),
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
    parser.add_argument("--steps", type=int, help="steps of each run; the first is left out (default: by the case)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--model", help="model directory for the case smollm2")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: bfloat16 autocast on both sides")
    parser.add_argument("--runtime", choices=RUNTIMES, default="local", help="ours; ray: torch and transformers in Ray actors")
    parser.add_argument(
        "--vllm", action="store_true", help="both sides sample with vLLM on the trainer's device; local runtime"
    )
    parser.add_argument("--continuous-batching", action="store_true", help="TRL samples with transformers' continuous batching")
    parser.add_argument("--liger", action="store_true", help="TRL takes Liger's kernels and loss, where they are installed")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.vllm and options.continuous_batching:
        parser.error("--vllm and --continuous-batching are two ways to sample: choose one")
    if options.steps is not None and options.steps < 2:
        parser.error("--steps: at least 2, because the first is left out")
    peak = matmul_gflops(options.threads)
    print(f"{options.threads} threads; fp32 matrix products reach {peak:.0f} GFLOP/s here")
    results = {}
    for name in options.case or ["smollm2"]:
        with tempfile.TemporaryDirectory() as folder:
            case = CASES[name] if options.steps is None else replace(CASES[name], steps=options.steps)
            results[name] = compare(name, case, Path(folder), options, peak)
    if options.json:
        print(json.dumps({"ratio": min(result["ratio"] for result in results.values()), "cases": results}))


def compare(
    name: str,
    case: Case,
    folder: Path,
    options: argparse.Namespace,
    peak: float,
    after_round: Callable[[dict[str, Any]], None] = lambda so_far: None,
) -> dict[str, Any]:
    """Run both sides in turn; ``after_round`` gets the result of the rounds so far."""
    inputs = prepare(case, folder, options.model, options.device)
    peers: list[dict[str, Any]] = []
    rows: dict[str, list[dict[str, float]]] = {kernels: [] for kernels in options.kernels or ["auto"]}
    ours: dict[str, list[float]] = {kernels: [] for kernels in rows}

    def result() -> dict[str, Any]:
        theirs = [peer["seconds"] for peer in peers]
        results = {
            kernels: {
                "ratio": round(statistics.median(theirs) / statistics.median(ours[kernels]), 3),
                "ours_s": [round(value, 4) for value in ours[kernels]],
                "phases_s": {phase: round(middle(steps)[phase], 4) for phase in phases(steps)},
            }
            for kernels, steps in rows.items()
        }
        ratio = min(each["ratio"] for each in results.values())
        return {"ratio": ratio, "trl_s": [round(value, 4) for value in theirs], "trl": peers[-1]["how"], "kernels": results}

    for number in range(options.rounds):
        for kernels in rows:
            steps = our_steps(case, inputs, folder / f"run-{number}-{kernels}", options, kernels)
            ours[kernels].append(statistics.median(row["time/step"] for row in steps))
            rows[kernels] += steps
        peers.append(peer_run(case, inputs, options))
        for kernels in rows:
            theirs, mine = peers[-1]["seconds"], ours[kernels][-1]
            print(
                f"{name} round {number + 1}: TRL {theirs:.3f} s, rlhf-host (kernels {kernels}) {mine:.3f} s,"
                f" ratio {theirs / mine:.2f}",
                flush=True,
            )
        after_round(result())
    theirs = statistics.median(peer["seconds"] for peer in peers)
    for kernels, steps in rows.items():
        mine = statistics.median(ours[kernels])
        print(f"{name}: TRL {theirs:.3f} s, rlhf-host (kernels {kernels}) {mine:.3f} s per step: ratio {theirs / mine:.2f}")
        explain(case, inputs, middle(steps), peak)
    return result()


def phases(steps: list[dict[str, float]]) -> list[str]:
    return [key for key in steps[-1] if key.startswith("time/") and key != "time/wall"]


def middle(steps: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(row.get(key, 0.0) for row in steps) for key in steps[-1]}


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


def peer_run(case: Case, inputs: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """The median of TRL's seconds per step, and how it sampled and trained."""
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
    arguments += ["--continuous-batching"] * options.continuous_batching + ["--liger"] * options.liger
    answer = run_peer(options.peer_python, "trl_peer.py", arguments, options.threads)
    whole = case.prompts * case.samples * case.new_tokens
    if not case.ragged and set(answer.get("tokens", [whole])) != {whole}:
        sys.exit(f"TRL sampled {answer['tokens']} tokens in its steps, not {whole} in each: the sides do not do the same work")
    return {"seconds": statistics.median(answer["seconds"]), "how": answer.get("how", "")}


def prepare(case: Case, folder: Path, model: str | None, device: str = "cpu") -> dict[str, Any]:
    """Model directories for both sides, prompts, and the reward plugin."""
    from transformers import AutoTokenizer

    peer = folder / "model"
    if case.model:
        peer = Path(model or ROOT / case.model)
        if not (peer / "config.json").exists():
            sys.exit(f"{peer} is not there: run `make smollm2`, or give --model DIR")
        rows = [json.loads(line) for line in (ROOT / "examples/data/gsm8k_sample.jsonl").read_text().splitlines()]
        prompts = [row["question"] for row in rows][: case.prompts * case.steps]
    else:
        write_model(case, peer, device)
        dice = random.Random(0)
        prompts = ["".join(dice.choices("0123456789", k=case.prompt)) for _ in range(case.prompts * case.steps)]
    data = folder / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": prompt, "label": "7"}) + "\n" for prompt in prompts))
    tokenizer = AutoTokenizer.from_pretrained(peer)
    # TRL's min_new_tokens forbids the end token; here the same weights simply have none.
    ours = peer if case.ragged else endless(peer, folder / "endless")
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
        "parameters": parameters(peer),
        "prompt_tokens": statistics.mean(lengths),
    }


def write_model(case: Case, directory: Path, device: str) -> None:
    """A model of the case's size with random weights, made on the device if it is a large one."""
    import torch
    from rlhf_authoring.models import write_tiny_model
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, layers, heads = case.size
    if not case.half:
        write_tiny_model(directory, hidden=hidden, layers=layers, heads=heads)
        return
    write_tiny_model(directory, positions=2 * (case.prompt + case.new_tokens))  # its tokenizer and configuration
    config = LlamaConfig.from_pretrained(directory)
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = hidden, 2 * hidden, layers
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = heads, heads // 2, hidden // heads
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    del model
    if device != "cpu":
        torch.cuda.empty_cache()


def endless(model: Path, directory: Path) -> Path:
    """The same weights, by links, with a configuration that has no token that ends an answer."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    directory.mkdir()
    for path in model.glob("*.safetensors*"):
        (directory / path.name).symlink_to(path.resolve())
    shutil.copy(model / "config.json", directory)
    if (model / "generation_config.json").exists():
        generation = GenerationConfig.from_pretrained(model)
    else:
        generation = GenerationConfig.from_model_config(AutoConfig.from_pretrained(model))
    generation.eos_token_id = None
    generation.save_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(model)
    template, tokenizer.eos_token = tokenizer.chat_template, None
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    return directory


def parameters(model: Path) -> int:
    """Number of weights in its files."""
    from safetensors import safe_open

    count = 0
    for path in model.glob("*.safetensors"):
        with safe_open(path, "pt") as weights:
            count += sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118
    return count


def render(tokenizer: Any, prompt: str) -> list[int]:
    if not tokenizer.chat_template:
        return tokenizer(prompt)["input_ids"]
    text = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


if __name__ == "__main__":
    main()
