"""The probe after a sync between processes: a sync that did not happen, or left an engine out, is noticed."""

from __future__ import annotations

import asyncio

import pytest
import torch
from rlhf_authoring.models import tiny_tokenizer

from rlhf_host.errors import RunError
from rlhf_host.models.passes import Passes
from rlhf_host.protocols import SyncTarget
from rlhf_host.weight_sync.local_source import LocalSource
from rlhf_host.weight_sync.verify import probe_prompt, verify_sync

from ...weight_sync.rig import train


def actor(model):
    """``logprobs(trajectories)`` as a role gives them."""

    async def logprobs(trajectories):
        found = []
        for row in trajectories:
            ids = torch.tensor([row.segments[1].token_ids])
            with torch.no_grad():
                found.append(
                    Passes(model).forward([row.prompt_ids], ids, torch.ones_like(ids, dtype=torch.bool)).logprobs[0].tolist()
                )
        return found

    return logprobs


PROMPT = probe_prompt(tiny_tokenizer(), 512)


@pytest.mark.parametrize("way", ["broadcast", "ipc", "checkpoint"])
def test_a_skipped_sync_is_caught(way, engines, models, load, connect):
    async def scenario():
        model = load()
        source, targets = LocalSource(model), [SyncTarget(f"e{i}", engine) for i, engine in enumerate(engines)]
        for engine in engines:
            await engine.build(models[False])
        plugin = await connect(way, engines)
        await plugin.send(source, 0)
        assert await verify_sync(targets, actor(model), 0, PROMPT) <= 1e-5

        with torch.no_grad():  # about as far as a few updates go
            for parameter in model.parameters():
                parameter.add_(1e-3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        for engine in engines:
            await engine.pretend(1)
        with pytest.raises(
            RunError, match=r"engine e0 does not have the trainer's weights of version 1.*differ by .* on average.*sync.verify"
        ):
            await verify_sync(targets, actor(model), 1, PROMPT)

        await plugin.send(source, 2)
        assert await verify_sync(targets, actor(model), 2, PROMPT) <= 1e-5
        await plugin.close()

    asyncio.run(scenario())


def test_an_engine_that_was_left_out_is_named(engines, models, load, connect):
    async def scenario():
        model = load()
        for engine in engines:
            await engine.build(models[False])
        plugin = await connect("ipc", engines)
        await plugin.send(LocalSource(model), 0)
        train(model, 1)
        await plugin.connect([SyncTarget("e0", engines[0])])
        await plugin.send(LocalSource(model), 1)
        targets = [SyncTarget(f"e{i}", engine) for i, engine in enumerate(engines)]
        with pytest.raises(RunError, match=r"engine e1 samples under version \[0\] after the sync of version 1"):
            await verify_sync(targets, actor(model), 1, PROMPT)
        await plugin.close()

    asyncio.run(scenario())
