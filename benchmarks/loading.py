"""Memory of each rank while a model is loaded to be trained by the backend ``fsdp`` or ``deepspeed`` (ZeRO stage 3): in pieces, and
whole first.

    python benchmarks/loading.py                    # 214 million weights in bfloat16 files, 2 and 4 ranks
    python benchmarks/loading.py --size 2b          # 2 billion weights, 2 ranks, LoRA, and a step

Anonymous resident memory above what the imports take, sampled every 2 ms, in MB. One weight is trained, or an adapter: an optimizer
would be beside the weights. A share is what a rank keeps: all float32 weights over the number of ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf_host.distributed.split.ports import reserved

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8, "vocab_size": 4096},
    "214m": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12, "vocab_size": 16384},
    "2b": {"hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 22, "vocab_size": 32000},
}
HEADS = {"num_attention_heads": 16, "num_key_value_heads": 4, "tie_word_embeddings": False}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="214m")
    parser.add_argument("--backend", choices=["fsdp", "deepspeed"], default="fsdp")
    parser.add_argument("--ranks", type=int, action="append")
    parser.add_argument("--way", choices=["pieces", "whole"], action="append")
    parser.add_argument("--rank", nargs=3, metavar=("RANK", "PORT", "DIRECTORY"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        rank, port, directory = given.rank
        print(json.dumps(one_rank(given, int(rank), given.ranks[0], int(port), Path(directory))))
        return
    with tempfile.TemporaryDirectory(prefix="rlhf-loading-") as directory:
        figures = write_model(given.size, Path(directory))
        ways = given.way or (["pieces"] if given.size == "2b" else ["pieces", "whole"])
        for ranks in given.ranks or ([2] if given.size == "2b" else [2, 4]):
            for way in ways:
                found = all_ranks(given, ranks, way, directory)
                share = figures["weights_mb"] / ranks
                line = {"ranks": ranks, "way": way, "share_mb": round(share, 1), "block_mb": figures["block_mb"], **found}
                print(json.dumps(line | {"over_share": round(found["load_mb"] / share, 2)}), flush=True)


def write_model(size: str, directory: Path) -> dict[str, float]:
    """Writes a model of random bfloat16 weights. Returns megabytes in float32: of all of them, and of its largest block."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    torch.set_default_dtype(torch.bfloat16)
    model = AutoModelForCausalLM.from_config(Qwen2Config(**SIZES[size], **HEADS))
    model.save_pretrained(directory, max_shard_size="1GB")
    blocks = [*model.model.layers, model.model.embed_tokens]
    sizes = [sum(weight.numel() for weight in block.parameters()) for block in blocks]
    return {"weights_mb": model.num_parameters() * 4 / 1e6, "block_mb": round(max(sizes) * 4 / 1e6, 1)}


def all_ranks(given: argparse.Namespace, ranks: int, way: str, directory: str) -> dict[str, Any]:
    """Returns the largest figures of all ranks, and the sum of what they hold at most."""
    place = reserved("127.0.0.1")
    port = place.getsockname()[1]
    # What is freed goes back to the system at once.
    settings = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--size", given.size, "--backend", given.backend, "--way", way, "--ranks", str(ranks)]
    processes = [
        subprocess.Popen(
            [*command, "--rank", str(rank), str(port), directory],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if rank else None,
            text=True,
            env=os.environ | settings,
        )
        for rank in range(ranks)
    ]
    outputs = [process.communicate()[0] for process in processes]
    place.close()
    if any(process.returncode for process in processes):
        raise SystemExit(f"a rank ended with {[process.returncode for process in processes]}")
    found = [json.loads(output.splitlines()[-1]) for output in outputs]
    worst = {key: max(each[key] for each in found) for key in found[0]}
    return worst | {"all_ranks_mb": round(sum(each["process_mb"] for each in found))}


def one_rank(given: argparse.Namespace, rank: int, size: int, port: int, directory: Path) -> dict[str, float]:
    import torch

    from rlhf_host.config.schema import RoleConfig, TrainConfig
    from rlhf_host.distributed.split.ranks import Ranks
    from rlhf_host.distributed.split.weight_reader import load_sharded
    from rlhf_host.models.loading import load_model
    from rlhf_host.training.role import Role

    plugin: Any
    if given.backend == "fsdp":
        import rlhf_backend_fsdp.backend  # noqa: F401, what it imports is not the model's
        from rlhf_backend_fsdp import FSDP

        plugin = FSDP(FSDP.Options())
    else:
        from rlhf_host.distributed.deepspeed.plugin import DeepSpeed
        from rlhf_host.distributed.deepspeed.setup import library

        library(torch.device("cpu"))
        plugin = DeepSpeed(DeepSpeed.Options(zero_stage=3))
    torch.set_num_threads(1)
    ranks = Ranks.join(rank, size, "127.0.0.1", port)
    # No optimizer of the whole model beside it.
    adapter: Any = {"lora": {"rank": 8}, "gradient_checkpointing": True}
    partly = adapter if given.size == "2b" else {"train_only": ["model.norm.weight"]}
    settings = RoleConfig(model=str(directory), lr=1e-4, **partly)
    figures: dict[str, float] = {}
    with peak(figures, "load"):
        pieces = load_sharded(settings) if given.way == ["pieces"] else None
        model = load_model(settings, trainable=True) if pieces is None else pieces.model
        more: Any = {"backend": plugin, "settings": settings, "total_updates": 1, "ranks": ranks, "pieces": pieces}
        role = Role.of("actor", model, TrainConfig(), **more)
        del pieces, more
    if given.size == "2b":
        with peak(figures, "step"):
            ids = torch.randint(1000, (1, 64), generator=torch.Generator().manual_seed(rank))
            outputs = role.passes.forward([[1, 2, 3, 4]], ids, torch.ones_like(ids, dtype=torch.bool))
            assert role.backend is not None
            assert outputs.logprobs is not None
            role.backend.backward(outputs.logprobs.mean())
            assert role.backend.step().applied
    return figures | {"process_mb": most("VmHWM")}


@contextlib.contextmanager
def peak(into: dict[str, float], name: str) -> Iterator[None]:
    base, largest, done, begun = most("RssAnon"), [0.0], threading.Event(), time.monotonic()

    def watch() -> None:
        while not done.wait(0.002):
            largest[0] = max(largest[0], most("RssAnon") - base)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        into |= {f"{name}_mb": round(largest[0], 1), f"{name}_kept_mb": round(most("RssAnon") - base, 1)}
        into[f"{name}_s"] = round(time.monotonic() - begun, 1)


def most(key: str) -> float:
    """Returns a figure of this process in MB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024 / 1e6


if __name__ == "__main__":
    main()
