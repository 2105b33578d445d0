"""The trainer's model of weight syncs, other weights for it, and how far from it engines sample."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from rlhf_authoring.models import write_tiny_model

from rlhf_host.records.episodes import Sampling


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Untied and tied: 0.6M parameters, three buckets of a megabyte."""
    root = tmp_path_factory.mktemp("models")
    return {tied: write_tiny_model(root / str(tied), hidden=128, layers=4, tied=tied) for tied in (False, True)}


@pytest.fixture
def load(models: dict[bool, Path]):
    """``load(tied)``: the trainer's model."""
    from transformers import AutoModelForCausalLM

    loaded = {tied: AutoModelForCausalLM.from_pretrained(path).eval() for tied, path in models.items()}
    return lambda tied=False: copy.deepcopy(loaded[tied])


def train(model: torch.nn.Module, seed: int) -> None:
    """Weights as far from before as if they were others: a wrong one shows in every log-probability."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.15 if parameter.dim() > 1 else 0.3))


PREFIXES = [[3 + (7 * i * i + 5 * salt) % 50 for i in range(200)] for salt in range(4)]


async def largest_gap(engines: list[Any], model: torch.nn.Module, version: int, count: int = 24) -> float:
    """``count`` sampled completions of long shared prompts: the largest difference between the engines' log-probabilities
    and those of a plain forward pass."""
    sampling = Sampling(6)
    requests = [(engines[i % len(engines)], PREFIXES[i % 8 // 2], i) for i in range(count)]
    said = await asyncio.gather(
        *(engine.generate(prompt, sampling, (0, 0, 0, 0, 0, i, version)) for engine, prompt, i in requests)
    )
    largest = 0.0
    for (_, prompt, _), generation in zip(requests, said, strict=True):
        assert set(generation.versions) == {version}
        ids = torch.tensor([prompt + generation.token_ids])
        with torch.no_grad():
            logprobs = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)
        expected = logprobs.gather(-1, torch.tensor(generation.token_ids)[:, None])[:, 0]
        largest = max(largest, float((expected - torch.tensor(generation.logprobs, dtype=torch.float64)).abs().max()))
    return largest
