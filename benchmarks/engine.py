"""Tokens per second of the embedded engine beside transformers' own ``generate``: same model, same prompts, in turn.

    python benchmarks/engine.py                                  # 0.6M-parameter Llama made on the spot, 16 x 8 x 32
    python benchmarks/engine.py --model DIR --prompts 4 --prompt-tokens 120 --new 64
    python benchmarks/engine.py --ragged                         # prompts of different lengths

Every completion has its full length: end-of-sequence tokens are off on both sides.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from rlhf_host.config.defaults import kernels_to_try
from rlhf_host.config.schema import PluginChoice
from rlhf_host.engines.embedded import EmbeddedEngine
from rlhf_host.engines.transformers import Transformers
from rlhf_host.protocols import EngineStart
from rlhf_host.records.episodes import Sampling
from rlhf_host.runtimes.building import chosen_kernels
from rlhf_host.runtimes.compute import Inline


def tiny_model(hidden: int, layers: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=60, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def make_prompts(count: int, tokens: int, vocabulary: int, ragged: bool, seed: int) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = (
        torch.randint(max(1, tokens // 2), tokens + 1, (count,), generator=generator).tolist() if ragged else [tokens] * count
    )
    return [tuple(torch.randint(3, vocabulary, (length,), generator=generator).tolist()) for length in lengths]


def peer(model: torch.nn.Module, prompts: list[tuple[int, ...]], samples: int, new: int) -> None:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]).repeat_interleave(samples, 0)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts]).repeat_interleave(samples, 0)
    ids, mask = ids.to(model.device), mask.to(model.device)
    lengths = {"max_new_tokens": new, "min_new_tokens": new}
    model.generate(ids, attention_mask=mask, do_sample=True, top_k=0, pad_token_id=0, **lengths)  # type: ignore[operator]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model directory or hub name; without it a tiny Llama is made")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8, help="completions per prompt")
    parser.add_argument("--new", type=int, default=32, help="tokens per completion")
    parser.add_argument("--ragged", action="store_true", help="prompts between half and all of --prompt-tokens")
    parser.add_argument("--repeats", type=int, default=3, help="timed rounds, after one that warms up")
    parser.add_argument("--kernels", default="auto", help="auto, none, or NAME")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: torch's default")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    model = (
        AutoModelForCausalLM.from_pretrained(args.model, dtype="float32")
        if args.model
        else tiny_model(args.hidden, args.layers)
    )
    model = model.eval().to(args.device)
    model.generation_config.eos_token_id = None
    prompts = make_prompts(args.prompts, args.prompt_tokens, model.config.get_text_config().vocab_size, args.ragged, seed=0)
    requests = [(prompt, (0, i, j)) for i, prompt in enumerate(prompts) for j in range(args.samples)]
    kernels = chosen_kernels(kernels_to_try(PluginChoice(name=args.kernels)))
    start = EngineStart(model=model, tokenizer=None, version=0, compute=Inline(), kernels=kernels)
    engine = EmbeddedEngine(Transformers.Options(max_batch_size=len(requests)), start)

    async def ours() -> None:
        engine.expect(len(requests))
        await asyncio.gather(*(engine.generate(prompt, Sampling(args.new), key) for prompt, key in requests))

    seconds: dict[str, list[float]] = {"engine": [], "generate": []}
    for round_number in range(args.repeats + 1):
        # A new version each time, as after a training step: what depends on the weights is made again.
        engine.set_version(round_number)
        for name in seconds:
            start = time.perf_counter()
            if name == "engine":
                asyncio.run(ours())
            else:
                peer(model, prompts, args.samples, args.new)
            if round_number:
                seconds[name].append(time.perf_counter() - start)

    tokens = len(requests) * args.new
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    result = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "batch": [args.prompts, args.samples, args.new],
        "prompt_tokens": args.prompt_tokens,
        "ragged": args.ragged,
        "threads": torch.get_num_threads(),
        "device": args.device,
        "kernels": getattr(kernels, "reports", []),
        "engine_tokens_per_s": round(tokens / medians["engine"]),
        "generate_tokens_per_s": round(tokens / medians["generate"]),
        "ratio": round(medians["generate"] / medians["engine"], 2),
        "best_engine_tokens_per_s": round(tokens / min(seconds["engine"])),
        "best_generate_tokens_per_s": round(tokens / min(seconds["generate"])),
        "seconds": {name: [round(value, 4) for value in times] for name, times in seconds.items()},
    }
    if args.json:
        print(json.dumps(result))
    else:
        for key, value in result.items():
            print(f"{key:28} {value}")


if __name__ == "__main__":
    main()
