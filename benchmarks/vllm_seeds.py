"""Seconds of vLLM's steps with a seed for each request and without: same engine, same prompts, in turn.

    python benchmarks/vllm_seeds.py                        # a tiny Llama made on the spot; 64, 128 and 256 requests
    python benchmarks/vllm_seeds.py --vocabulary 32000 --new 64 --repeats 5

CPU seconds are of the thread that steps vLLM and are less disturbed by other programs than the clock's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time

from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_host.distributed.vllm.engine import VLLMEngine
from rlhf_host.distributed.vllm.plugin import Vllm
from rlhf_host.engines.plain_path import PlainKernels
from rlhf_host.protocols import EngineStart
from rlhf_host.records.episodes import Sampling
from rlhf_host.runtimes.compute import Inline


def start_engine(directory: str, vocabulary: int, requests: int) -> VLLMEngine:
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory)
    start = EngineStart(model=directory, tokenizer=None, version=0, compute=Inline(), kernels=PlainKernels())
    extra = {"skip_tokenizer_init": True}
    return VLLMEngine(Vllm.Options(max_num_seqs=requests, multiprocess=False, extra=extra), start)


async def sample(engine: VLLMEngine, requests: int, new: int) -> tuple[float, float]:
    """Returns seconds by the clock, and CPU seconds of the engine's thread."""

    def cpu() -> float:
        return float(engine._submit(time.thread_time).result())

    clock, begun = time.perf_counter(), cpu()
    await asyncio.gather(*(engine.generate([3, 4, 5, 6 + i], Sampling(new), (0, i, 0)) for i in range(requests)))
    return time.perf_counter() - clock, cpu() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--new", type=int, default=48, help="tokens per completion")
    parser.add_argument("--repeats", type=int, default=5, help="timed rounds of each, after one that warms up")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        engine = start_engine(directory, args.vocabulary, max(args.requests))
        for requests in args.requests:
            rounds: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
            for number in range(args.repeats + 1):
                for seeds in rounds:
                    engine.options.seeds = seeds
                    seconds = asyncio.run(sample(engine, requests, args.new))
                    if number:
                        rounds[seeds].append(seconds)
            clock, cpu = (
                {seeds: statistics.median(pair[place] for pair in pairs) for seeds, pairs in rounds.items()} for place in (0, 1)
            )
            print(
                json.dumps(
                    {
                        "requests": requests,
                        "vocabulary": args.vocabulary,
                        "ms_per_step": {"seeds": 1e3 * clock[True] / args.new, "without": 1e3 * clock[False] / args.new},
                        "ratio": round(clock[True] / clock[False], 3),
                        "cpu_ms_per_step": {"seeds": 1e3 * cpu[True] / args.new, "without": 1e3 * cpu[False] / args.new},
                        "cpu_ratio": round(cpu[True] / cpu[False], 3),
                        "clock_rounds": {str(seeds): [round(pair[0], 3) for pair in pairs] for seeds, pairs in rounds.items()},
                    }
                ),
                flush=True,
            )
        asyncio.run(engine.close())


if __name__ == "__main__":
    main()
