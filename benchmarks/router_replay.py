"""Distance of the trainer's log-probabilities from the engine's in a mixture of experts, with and without replayed experts.

    python benchmarks/router_replay.py [--tokens 64] [--rows 64]

vLLM samples on a CPU from a tiny model in bfloat16 and tells which experts each token took; the trainer has the same weights in
float32. Models are made here, with weights that are not trained: routers that are less sure differ more often. ``changed`` is the
share of choices (a token in a layer) for which the trainer would have taken other experts, ``tokens`` that of tokens with such a
choice in any layer. The other figures are of sampled tokens: |log pi - log mu|, its mean and its largest, the estimate k3 of
KL(mu || pi), and the share of tokens whose ratio is outside of 0.8 to 1.25.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import torch
import transformers
from rlhf_authoring.models import write_tiny_model
from rlhf_plugin_experts.routers import routers_of

from rlhf_host.distributed.vllm.plugin import Vllm
from rlhf_host.engines.plain_path import PlainKernels
from rlhf_host.models.passes import Passes
from rlhf_host.protocols import EngineStart
from rlhf_host.records.episodes import Sampling
from rlhf_host.runtimes.compute import Inline

QWEN = {"num_experts": 32, "num_experts_per_tok": 8, "moe_intermediate_size": 64}
MODELS = {
    "Qwen3-MoE, 8 layers, 8 of 32": (transformers.Qwen3MoeConfig, QWEN),
    "Mixtral, 8 layers, 2 of 8": (transformers.MixtralConfig, {"num_local_experts": 8, "num_experts_per_tok": 2}),
}


def make(kind, more, directory: Path, vocabulary: int):
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
        "initializer_range": 0.08,
        "torch_dtype": "float32",
    }
    model = transformers.AutoModelForCausalLM.from_config(kind(**sizes, **more)).eval()
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.save_pretrained(directory)
    return model


class Told:
    """Choices of vLLM's routers, request by request: vLLM 0.32 tells them by itself only with its second model runner, which needs
    Triton, and CPUs have none. The callbacks are vLLM's own.
    """

    def __init__(self, engine):
        self.layers = {}
        core = engine.llm.engine_core.engine_core
        model = core.model_executor.driver_worker.worker.model_runner.get_model()
        for module in model.modules():
            if type(module).__name__ == "MoERunner":
                module.router.set_capture_fn(partial(self.note, module.layer_id))

    def note(self, layer, experts):
        self.layers.setdefault(layer, []).append(experts.clone())

    async def generate(self, engine, ids, sampling, key):
        """The answer to the only request under way, with its experts."""
        self.layers.clear()
        answer = await engine.generate(ids, sampling, key)
        routes = torch.stack([torch.cat(self.layers[layer]) for layer in sorted(self.layers)], 1)
        answer.traces = {"routed_experts": routes[: len(ids) + len(answer.token_ids) - 1].numpy().astype(np.uint8)}
        return answer


async def sample(engine, prompts, tokens: int):
    told = Told(engine)
    answers = [await told.generate(engine, ids, Sampling(tokens), (0, row)) for row, ids in enumerate(prompts)]
    await engine.close()
    return answers


def measured(engine_logprobs: torch.Tensor, logprobs: torch.Tensor) -> list[float]:
    difference = logprobs.double() - engine_logprobs.double()
    ratio = difference.exp()
    k3 = (ratio - 1 - difference).mean()
    outside = ((ratio < 0.8) | (ratio > 1.25)).double().mean()
    return [float(each) for each in (difference.abs().mean(), difference.abs().max(), k3, outside)]


def compare(name: str, tokens: int, rows: int) -> None:
    kind, more = MODELS[name]
    with tempfile.TemporaryDirectory() as directory:
        path = write_tiny_model(Path(directory) / "tokenizer", hidden=128)
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        model = make(kind, more, Path(directory) / "model", len(tokenizer))
        tokenizer.eos_token = None
        start = EngineStart(
            model=Path(directory) / "model", tokenizer=tokenizer, version=0, compute=Inline(), kernels=PlainKernels()
        )
        engine = Vllm(Vllm.Options(dtype="bfloat16", enable_prefix_caching=False)).start(start)
        draw = random.Random(0)
        prompts = [[draw.randrange(3, len(tokenizer)) for _ in range(48)] for _ in range(rows)]
        answers = asyncio.run(sample(engine, prompts, tokens))
    ids = torch.tensor([list(answer.token_ids) for answer in answers])
    mask, own = torch.ones_like(ids, dtype=torch.bool), torch.tensor([list(answer.logprobs) for answer in answers])
    passes = Passes(model)
    with torch.no_grad():
        without = passes.forward(prompts, ids, mask).logprobs
        seen = []

        @contextlib.contextmanager
        def around(model, lengths, traces):
            with routers_of(model).during(lengths, traces) as own:
                yield
            seen.append(own)

        passes.around = around
        with_replay = passes.forward(prompts, ids, mask, traces=[answer.traces for answer in answers]).logprobs
    changed = torch.stack(seen[-1].changed)
    print(f"\n{name}; {rows} rows of 48 + {tokens} tokens; changed {float(changed.float().mean()):.4f}", end="")
    print(f", tokens {float(changed.any(0).float().mean()):.4f}")
    print("| | mean | largest | k3 | outside |\n|---|---|---|---|---|")
    for what, values in (("own experts", without), ("replayed", with_replay)):
        print(f"| {what} | " + " | ".join(f"{value:.2e}" for value in measured(own, values)) + " |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rows", type=int, default=64)
    arguments = parser.parse_args()
    for name in MODELS:
        compare(name, arguments.tokens, arguments.rows)
