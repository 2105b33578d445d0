"""Peak memory and time of token log-probabilities and their gradients for a vocabulary of 150k, beside the full logits.

    python benchmarks/logprob_memory.py                      # 16 rows of 64 + 64 tokens, a two-layer model
    python benchmarks/logprob_memory.py --rows 4 --threads 1
    python benchmarks/logprob_memory.py --kept               # bytes that a pass keeps per token of the budget, by layout

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


def print_kept(options: argparse.Namespace) -> None:
    """Prints what passes over one group keep for the backward pass, per token that they compute and per token of their cost in
    ``train.max_tokens_per_microbatch``. A storage counts once.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from rlhf_host.models.activation_memory import recorded
    from rlhf_host.models.passes import Passes

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=options.hidden, intermediate_size=2 * options.hidden, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().to(options.device)
    print("layout  prompt completions of  tokens    cost  kB/token  kB/cost  of padded", flush=True)
    padded = 0.0
    for layout, prompt, count, length in (
        ("padded", 512, 8, 256), ("shared", 512, 8, 256), ("shared", 1024, 16, 64), ("shared", 1024, 64, 16),
    ):  # fmt: skip
        passes = Passes(model, shared_prefix="off" if layout == "padded" else "on")
        prompts, ids = [[1] * prompt] * count, torch.ones(count, length, dtype=torch.int64)
        passes.prepare(prompt + length)
        with recorded(model) as kept:
            outputs = passes.forward(prompts, ids, torch.ones_like(ids, dtype=torch.bool))
        kilobytes = sum(kept.values()) / 1e3
        tokens, cost = (count_of(prompts, [length] * count) for count_of in (passes.tokens, passes.cost))
        padded = padded or kilobytes / cost
        print(
            f"{layout} {prompt:7} {count:11} {length:2} {tokens:7} {cost:7} {kilobytes / tokens:9.1f} {kilobytes / cost:8.1f}"
            f" {kilobytes / cost / padded:10.2f}",
            flush=True,
        )
        del outputs


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
    parser.add_argument("--kept", action="store_true", help="memory per token of the budget, by layout")
    options = parser.parse_args()
    if options.kept:
        return print_kept(options)
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
    settings = {name: value for name, value in vars(options).items() if name not in ("way", "kept")}
    print(json.dumps({"benchmark": "logprob_memory", **settings, **found}))


if __name__ == "__main__":
    main()
