"""Two engines in processes of their own, a trainer here, and the ways between them."""

from __future__ import annotations

import asyncio
import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rlhf_authoring.models import write_tiny_model

from rlhf_host.protocols import SyncTarget
from rlhf_host.records.episodes import Sampling
from rlhf_host.weight_sync.broadcast import Broadcast
from rlhf_host.weight_sync.checkpoint import Checkpoint
from rlhf_host.weight_sync.ipc import IPC

sys.path.insert(0, str(Path(__file__).parent))  # so that the engines' processes find what they run

from engine_host import EngineProcess

WAYS = {"broadcast": Broadcast, "ipc": IPC, "checkpoint": Checkpoint}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Untied and tied: 0.6M parameters, three buckets of a megabyte."""
    root = tmp_path_factory.mktemp("models")
    return {tied: write_tiny_model(root / str(tied), hidden=128, layers=4, tied=tied) for tied in (False, True)}


@pytest.fixture(scope="session")
def processes() -> Iterator[list[EngineProcess]]:
    found = [EngineProcess() for _ in range(2)]
    yield found
    for engine in found:
        engine.kill()


@pytest.fixture
def engines(processes: list[EngineProcess]) -> list[EngineProcess]:
    """Alive, whatever became of them in the test before."""
    processes[:] = [engine if engine.process.is_alive() else EngineProcess() for engine in processes]
    return processes


@pytest.fixture
def load(models: dict[bool, Path]):
    """``load(tied)``: the trainer's model."""
    from transformers import AutoModelForCausalLM

    loaded = {tied: AutoModelForCausalLM.from_pretrained(path).eval() for tied, path in models.items()}
    return lambda tied=False: copy.deepcopy(loaded[tied])


@pytest.fixture
def connect(tmp_path: Path):
    """``connect(way, engines, **options)``: the plugin, connected."""

    async def connected(way: str, engines: list[Any], **options: Any) -> Any:
        given = {"bucket_mb": 1, "timeout_s": 300.0} | ({"directory": tmp_path / "weights"} if way == "checkpoint" else {})
        plugin = WAYS[way](WAYS[way].Options(**(given | options)))
        await plugin.connect([SyncTarget(f"e{number}", engine) for number, engine in enumerate(engines)])
        return plugin

    return connected


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
