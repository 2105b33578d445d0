"""A vLLM engine of a tiny model beside the trainer's model."""

from __future__ import annotations

import asyncio
import random
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rlhf_authoring.models import write_tiny_model

from rlhf_host.backends.weights import in_buckets, named_weights
from rlhf_host.distributed.vllm.engine import VLLMEngine
from rlhf_host.distributed.vllm.plugin import Vllm
from rlhf_host.engines.plain_path import PlainKernels
from rlhf_host.protocols import EngineStart
from rlhf_host.runtimes.compute import Inline

KIB = 1024
SIZE = 60
"""Size of the tiny model's vocabulary."""


@dataclass
class Rig:
    """An engine that started without weights, and the trainer's model; ``refused`` is what it said before the first sync."""

    engine: VLLMEngine
    model: torch.nn.Module
    refused: list[Exception] = field(default_factory=list)

    def sync(self, version, weights=None, bucket_bytes=16 * KIB):
        weights = named_weights(self.model) if weights is None else weights
        if not self.engine.multiprocess:
            self.load(in_buckets(weights, bucket_bytes), version)
            return
        with tempfile.NamedTemporaryFile() as file:
            torch.save(dict(weights), file.name)
            asyncio.run(self.engine.run(f"{__name__}:load_file", file=file.name, version=version, bucket_bytes=bucket_bytes))

    def load(self, buckets, version):
        """As functions that ``engine.run`` calls do in an engine of one process."""
        self.engine.loader.load(buckets, version)

    def sample(self, prompts, sampling, keys=None):
        async def main():
            chosen = keys or [(7, i) for i in range(len(prompts))]
            jobs = [self.engine.generate(*request) for request in zip(prompts, [sampling] * len(prompts), chosen, strict=True)]
            return await asyncio.gather(*jobs)

        return asyncio.run(main())

    def train(self, seed):
        """Other weights, as different as training seldom makes them."""
        noise = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in self.model.parameters():
                weight += 0.05 * torch.randn(weight.shape, generator=noise)


def load_file(loader, file, version, bucket_bytes):
    """Runs beside the weights, in another process."""
    loader.load(in_buckets(torch.load(file, weights_only=True).items(), bucket_bytes), version)


def write_model(directory: Path, *, tied: bool) -> Path:
    """The tiny model, but no token ends a completion, so that lengths are known."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(write_tiny_model(directory, hidden=128, tied=tied))
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.save_pretrained(directory)
    return directory


def make_engine(directory: Path, version: int = -1, **options) -> VLLMEngine:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.eos_token = None
    start = EngineStart(model=directory, tokenizer=tokenizer, version=version, compute=Inline(), kernels=PlainKernels())
    return Vllm(Vllm.Options(**options)).start(start)


def prompts_of(count, length, seed=0):
    draw = random.Random(seed)
    return [[draw.randrange(3, SIZE) for _ in range(length)] for _ in range(count)]


def logprobs_of(model, prompt, tokens, temperature=1.0):
    """Transformers' own log-probabilities of ``tokens`` after ``prompt``, ``[T]`` float64."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0, len(prompt) - 1 : -1].double()
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


def mismatch(model, prompts, generations, temperature=1.0):
    return max(
        float((logprobs_of(model, prompt, made.token_ids, temperature) - torch.tensor(made.logprobs)).abs().max())
        for prompt, made in zip(prompts, generations, strict=True)
    )
