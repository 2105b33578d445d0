"""Weights reach engines in other processes, by every way there is."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from engine_host import EngineProcess, shared_mappings

from rlhf_host.backends.weights import in_buckets, named_weights
from rlhf_host.engines.loading import call_by_path
from rlhf_host.errors import RunError
from rlhf_host.protocols import SyncTarget
from rlhf_host.records.episodes import Sampling
from rlhf_host.weight_sync.local_source import LocalSource, LocalWeights

from ...weight_sync.rig import largest_gap, train

ways = pytest.mark.parametrize("way", ["broadcast", "ipc", "checkpoint"])


@ways
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_after_every_sync_log_probabilities_are_the_trainers(way, tied, engines, models, load, connect):
    async def scenario():
        model = load(tied)
        source = LocalSource(model)
        for engine in engines:
            await engine.build(models[tied])
        plugin = await connect(way, engines)
        for version in range(3):
            train(model, version)
            await plugin.send(source, version)
            assert [engine.version for engine in engines] == [version] * 2
            assert await largest_gap(engines, model, version) <= 1e-4
        await plugin.close()

    asyncio.run(scenario())


@ways
def test_weights_are_cast_before_they_travel(way, engines, models, load, connect):
    async def scenario():
        model = load()
        await engines[0].build(models[False])
        plugin = await connect(way, engines[:1], dtype="bfloat16")
        await plugin.send(LocalSource(model), 0)
        [held] = await engines[0].run("engine_host:weights_here")
        await plugin.close()
        for name, weight in model.state_dict().items():
            np.testing.assert_array_equal(held[name], weight.to(torch.bfloat16).float().numpy())

    asyncio.run(scenario())


@ways
def test_names_may_differ(way, engines, models, load, connect):
    async def scenario():
        wrapped = torch.nn.ModuleDict({"policy": load()})
        train(wrapped, 5)
        await engines[0].build(models[False])
        names = {"policy.": "", "policy.lm_head.weight": "lm_head.weight", "policy.model.norm.": "model.norm."}
        plugin = await connect(way, engines[:1], rename=names)
        await plugin.send(LocalSource(wrapped), 0)
        assert await largest_gap(engines[:1], wrapped["policy"], 0, count=8) <= 1e-4
        await plugin.close()

    asyncio.run(scenario())


@ways
def test_an_engine_that_misses_a_weight_refuses_to_generate(way, engines, models, load, connect):
    """An untied head left out, as ``named_parameters`` of a tied model does: without the check the old one goes on sampling."""

    async def scenario():
        model = load()
        for engine in engines:
            await engine.build(models[False])
        kept = [(name, weight) for name, weight in named_weights(model) if name != "lm_head.weight"]
        plugin = await connect(way, engines)
        with pytest.raises(
            RunError, match=rf"weight sync {way}: version 0 failed: engine e0: no weights came for lm_head.weight"
        ):
            await plugin.send(LocalSource(model, partial(in_buckets, kept)), 0)
        for engine in engines:
            assert engine.version == -1
            with pytest.raises(RunError, match="has no weights of this run"):
                await engine.generate([3, 4], Sampling(2), (0,))
        await plugin.send(LocalSource(model), 0)
        assert await largest_gap(engines, model, 0, count=8) <= 1e-4
        await plugin.close()

    asyncio.run(scenario())


@ways
def test_an_engine_of_another_shape_is_named(way, engines, models, load, connect, tmp_path):
    from rlhf_authoring.models import write_tiny_model

    async def scenario():
        await engines[0].build(models[False])
        await engines[1].build(write_tiny_model(tmp_path / "narrow", hidden=64, layers=4))
        plugin = await connect(way, engines)
        with pytest.raises(RunError, match=rf"weight sync {way}: version 0 failed: .*engine e1: the weight .* is \[.*64"):
            await plugin.send(LocalSource(load()), 0)
        with pytest.raises(RunError, match="has no weights of this run"):
            await engines[1].generate([3, 4], Sampling(2), (0,))

    asyncio.run(scenario())


@ways
def test_an_engine_killed_in_mid_sync_is_named_and_can_be_replaced(way, engines, models, load, connect):
    async def scenario():
        model = load()
        for engine in engines:
            await engine.build(models[False])
        plugin = await connect(way, engines)
        await plugin.send(LocalSource(model), 0)
        train(model, 1)

        def deadly(bucket_bytes):
            for number, bucket in enumerate(in_buckets(named_weights(model), bucket_bytes)):
                if number == 1:
                    engines[1].kill()
                yield bucket

        with pytest.raises(
            RunError, match=rf"weight sync {way}: version 1 failed: .*engine e1: the engine's process has ended"
        ):
            await plugin.send(LocalSource(model, deadly), 1)
        assert not engines[1].process.is_alive()

        engines[1] = EngineProcess()
        await engines[1].build(models[False])
        with pytest.raises(RunError, match="has no weights of this run"):
            await engines[1].generate([3, 4], Sampling(2), (0,))
        await plugin.connect([SyncTarget(f"e{number}", engine) for number, engine in enumerate(engines)])
        await plugin.send(LocalSource(model), 1)
        assert await largest_gap(engines, model, 1, count=16) <= 1e-4
        await plugin.close()

    asyncio.run(scenario())


@ways
def test_only_engines_that_are_behind_get_weights(way, engines, models, load, connect):
    """A replaced engine is brought up to the others' version; those go on undisturbed."""

    async def scenario():
        model = load()
        source = LocalSource(model)
        for engine in engines:
            await engine.build(models[False])
        plugin = await connect(way, engines)
        await plugin.send(source, 4)
        await engines[1].build(models[False])

        asked = []
        engines[0].run, run = lambda function, **_: asked.append(function) or run(function, **_), engines[0].run
        try:
            await plugin.send(source, 4)
            assert not [function for function in asked if function.endswith(("receive", "read", "join_receiver"))]
        finally:
            del engines[0].run
        assert await largest_gap(engines, model, 4, count=8) <= 1e-4
        train(model, 3)
        await plugin.send(source, 5)
        assert await largest_gap(engines, model, 5, count=8) <= 1e-4
        await plugin.close()

    asyncio.run(scenario())


class TwoRanks:
    """A trainer whose weights only come when both ranks ask for them, as when parameters are sharded."""

    model = None

    def __init__(self, model):
        self.meet = threading.Barrier(2, timeout=60)

        def gathered(rank, bucket_bytes):
            for bucket in in_buckets(named_weights(model), bucket_bytes):
                self.meet.wait()
                yield bucket if rank == 0 else []

        self.ranks = [LocalWeights(model, partial(gathered, rank), rank=rank, size=2) for rank in range(2)]

    async def run(self, function, **arguments):
        return await asyncio.gather(*(asyncio.to_thread(call_by_path, function, weights, arguments) for weights in self.ranks))


@ways
def test_a_trainer_of_two_ranks_gathers_together(way, engines, models, load, connect):
    async def scenario():
        model = load()
        source = TwoRanks(model)
        await engines[0].build(models[False])
        plugin = await connect(way, engines[:1])
        for version in range(2):
            train(model, version)
            await plugin.send(source, version)
            assert await largest_gap(engines[:1], model, version, count=8) <= 1e-4
        await plugin.close()

    asyncio.run(scenario())


@ways
def test_no_rank_is_left_waiting_when_an_engine_fails(way, engines, models, load, connect, tmp_path):
    from rlhf_authoring.models import write_tiny_model

    async def scenario():
        source = TwoRanks(load())
        await engines[0].build(write_tiny_model(tmp_path / "narrow", hidden=64, layers=4))
        plugin = await connect(way, engines[:1])
        with pytest.raises(RunError, match="engine e0: the weight"):
            await plugin.send(source, 0)
        assert source.meet.n_waiting == 0
        assert not source.meet.broken

    asyncio.run(scenario())


def test_broadcast_leaves_the_default_process_group_alone(engines, models, load, connect):
    """It belongs to whoever trains on several ranks."""

    async def scenario():
        await engines[0].build(models[False])
        plugin = await connect("broadcast", engines[:1])
        await plugin.send(LocalSource(load()), 0)
        await plugin.close()

    asyncio.run(scenario())
    assert not dist.is_initialized()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        asyncio.run(scenario())
        assert dist.group.WORLD is group
        assert dist.get_world_size() == 1
    finally:
        dist.destroy_process_group()


def test_broadcast_refuses_weights_that_change_their_shape(engines, models, load, connect):
    async def scenario():
        await engines[0].build(models[False])
        plugin = await connect("broadcast", engines[:1])
        source = LocalSource(load())
        await plugin.send(source, 0)
        source._weights._weights = lambda bucket_bytes: in_buckets(named_weights(load(True)), bucket_bytes // 2)
        with pytest.raises(RunError, match="are not those of the first sync"):
            await plugin.send(source, 1)

    asyncio.run(scenario())


def test_shared_memory_is_gone_after_the_end(engines, models, load, connect):
    """It has no name, so not even a killed trainer leaves any behind."""

    async def scenario():
        names = set(Path("/dev/shm").iterdir())
        await engines[0].build(models[False])
        plugin = await connect("ipc", engines[:1])
        await plugin.send(LocalSource(load()), 0)
        assert shared_mappings() > 0
        assert await engines[0].run("engine_host:shared_memory_here") > [0]
        assert set(Path("/dev/shm").iterdir()) <= names
        await plugin.close()
        assert shared_mappings() == 0
        assert await engines[0].run("engine_host:shared_memory_here") == [0]

    asyncio.run(scenario())


def test_a_late_engine_reads_what_was_written(engines, models, load, connect, tmp_path):
    async def scenario():
        model, gatherings = load(), []

        def gathered(bucket_bytes):
            gatherings.append(bucket_bytes)
            return in_buckets(named_weights(model), bucket_bytes)

        for engine in engines:
            await engine.build(models[False])
        source, plugin = LocalSource(model, gathered), await connect("checkpoint", engines[:1])
        await plugin.send(source, 7)
        await plugin.connect([SyncTarget(f"e{number}", engine) for number, engine in enumerate(engines)])
        await plugin.send(source, 7)
        assert len(gatherings) == 1
        assert await largest_gap(engines, model, 7, count=8) <= 1e-4

    asyncio.run(scenario())


def test_versions_of_another_run_are_overwritten_and_old_ones_removed(engines, models, load, connect, tmp_path):
    async def scenario():
        model, weights = load(), tmp_path / "weights"
        await engines[0].build(models[False])
        left = weights / "version-000003"
        left.mkdir(parents=True)
        (left / "model-00001.safetensors").write_bytes(b"of another run")
        (weights / ".version-000002.partial").mkdir()
        plugin = await connect("checkpoint", engines[:1], keep=2)
        for version in (2, 3, 4):
            train(model, version)
            await plugin.send(LocalSource(model), version)
            assert await largest_gap(engines[:1], model, version, count=8) <= 1e-4
        assert sorted(path.name for path in weights.iterdir()) == ["version-000003", "version-000004"]

    asyncio.run(scenario())


def test_what_is_written_is_an_ordinary_checkpoint(engines, models, load, connect, tmp_path):
    """With a config beside it, any library reads it; a tied head is there too."""
    from transformers import AutoConfig, AutoModelForCausalLM

    async def scenario():
        model = load(True)
        train(model, 1)
        await engines[0].build(models[True])
        plugin = await connect("checkpoint", engines[:1])
        await plugin.send(LocalSource(model), 0)
        written = tmp_path / "weights" / "version-000000"
        AutoConfig.from_pretrained(models[True]).save_pretrained(written)
        again = AutoModelForCausalLM.from_pretrained(written)
        for name, weight in model.state_dict().items():
            assert torch.equal(again.state_dict()[name], weight)

    asyncio.run(scenario())
