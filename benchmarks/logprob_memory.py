"""Peak memory and time of token log-probabilities and their gradients for a vocabulary of 150k, beside the full logits.

    python benchmarks/logprob_memory.py                      # 16 rows of 64 + 64 tokens, a two-layer model
    python benchmarks/logprob_memory.py --rows 4 --threads 1

Each way runs in a process of its own, on the same model and tokens: ``full`` is the model's logits, log-softmax, gather and
backward; ``chunked`` is ``rlhf_host.models.passes``. Memory is what the process needed beyond the loaded model and its
gradients. Linux only; ``--device cuda`` measures the GPU's memory instead.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def memory_mb(name: str) -> float:
    """``VmRSS`` (now) or ``VmHWM`` (the most since the last ``forget_peak``) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) / 1024
    raise OSError(f"no {name} in /proc/self/status")


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def measure(way: str, options: argparse.Namespace) -> dict[str, Any]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from rlhf_host.models.passes import Passes

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=options.vocabulary, hidden_size=options.hidden, intermediate_size=2 * options.hidden, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().to(options.device)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    prompts = torch.randint(options.vocabulary, (options.rows, options.prompt))
    completions = torch.randint(options.vocabulary, (options.rows, options.completion))
    on_gpu = options.device == "cuda"

    def full(prompts: Any, completions: Any) -> torch.Tensor:
        prompts, completions = prompts.to(options.device), completions.to(options.device)
        whole = torch.cat([prompts, completions], 1)
        logits = model(input_ids=whole, use_cache=False).logits[:, prompts.shape[1] - 1 : -1].float()
        return torch.log_softmax(logits, -1).gather(-1, completions[..., None]).squeeze(-1)

    def chunked(prompts: Any, completions: Any) -> torch.Tensor:
        mask = torch.ones_like(completions, dtype=torch.bool)
        found = Passes(model).forward(prompts.tolist(), completions, mask).logprobs
        assert found is not None
        return found

    compute = {"full": full, "chunked": chunked}[way]
    compute(prompts[:1, :2], completions[:1, :2]).sum().backward()  # what libraries allocate once
    forget_peak()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() / 2**20 if on_gpu else memory_mb("VmRSS")
    start = time.perf_counter()
    logprobs = compute(prompts, completions)
    logprobs.sum().backward()
    if on_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    peak = (torch.cuda.max_memory_allocated() / 2**20 if on_gpu else memory_mb("VmHWM")) - before
    gradient = sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None) ** 0.5
    return {
        "peak_mb": round(peak),
        "seconds": round(seconds, 2),
        "logprobs_sum": float(logprobs.detach().double().sum()),
        "grad_norm": gradient,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=150_000)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--completion", type=int, default=64, help="tokens")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--way", choices=["full", "chunked"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(measure(options.way, options)))
        return
    found = {}
    for way in ("full", "chunked"):
        command = [sys.executable, __file__, *sys.argv[1:], "--way", way]
        output = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout
        found[way] = json.loads(output.splitlines()[-1])
        print(f"{way:8} peak {found[way]['peak_mb']:6} MB  {found[way]['seconds']:7.2f} s")
    for number in ("logprobs_sum", "grad_norm"):
        gap = abs(found["full"][number] / found["chunked"][number] - 1)
        assert gap < 1e-4, f"{number} differs by {gap:.1e}"
    settings = {name: value for name, value in vars(options).items() if name != "way"}
    print(json.dumps({"benchmark": "logprob_memory", **settings, **found}))


if __name__ == "__main__":
    main()
