"""Routes of a plan on CPUs: places are invented, so that branches of GPUs are taken, with shared memory and gloo in their stead."""

from __future__ import annotations

import asyncio
import copy
import multiprocessing
import os
import signal
import threading
import time

import pytest
import torch
from rlhf_authoring.engines import ModuleEngine

from rlhf_host.backends.weights import in_buckets, named_weights
from rlhf_host.distributed.sync import remote, rendezvous
from rlhf_host.distributed.sync.plugin import IPC, Broadcast
from rlhf_host.distributed.sync.rendezvous import LINK
from rlhf_host.distributed.sync.transfer_plan import Route
from rlhf_host.engines.loading import call_by_path
from rlhf_host.errors import RunError
from rlhf_host.protocols import SyncTarget
from rlhf_host.weight_sync.local_source import LocalSource, LocalWeights


def make_model(seed=0, width=64):
    torch.manual_seed(seed)
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(5)))


class Ranks:
    """A trainer of several ranks that gather together. Each has weights of its own, so that it shows whose have come."""

    model = None

    def __init__(self, models):
        meet = threading.Barrier(len(models), timeout=60)

        def gathered(model, rank, bucket_bytes, everywhere=False):
            for bucket in in_buckets(named_weights(model), bucket_bytes):
                meet.wait()
                yield bucket if everywhere or rank == 0 else []

        def weights(rank):
            return lambda *sizes, **options: gathered(models[rank], rank, *sizes, **options)

        count = len(models)
        self.ranks = [
            LocalWeights(model, weights(rank), rank=rank, size=count, everywhere=True) for rank, model in enumerate(models)
        ]

    async def run(self, function, **arguments):
        return await asyncio.gather(*(asyncio.to_thread(call_by_path, function, weights, arguments) for weights in self.ranks))


@pytest.fixture
def places(monkeypatch):
    """Places by the ends: a rank's number, or an engine's name."""
    chosen = {}
    real = rendezvous.describe

    def describe(end):
        found = real(end)
        return found | {"place": found["place"] | chosen.get(getattr(end, "engine", getattr(end, "rank", None)), {})}

    monkeypatch.setattr(rendezvous, "describe", describe)
    return chosen


def targets_of(models):
    engines = [ModuleEngine(model) for model in models]
    for number, engine in enumerate(engines):
        engine._loader.engine = f"e{number}"
    return [SyncTarget(f"e{number}", engine) for number, engine in enumerate(engines)]


def same(one, other):
    return all(torch.equal(weight, other.state_dict()[name]) for name, weight in one.state_dict().items())


@pytest.mark.parametrize("way", [IPC, Broadcast])
def test_every_engine_reads_from_the_rank_on_its_gpu(way, places, caplog):
    places |= {end: {"device": "cuda", "gpu": f"g{number}"} for number in (0, 1) for end in (number, f"e{number}")}
    models = [make_model(1), make_model(2)]
    source, targets = Ranks(models), targets_of([make_model(3), make_model(4)])

    async def scenario():
        plugin = way(way.Options(timeout_s=60))
        await plugin.connect(targets)
        for version in range(2):
            await plugin.send(source, version)
            for rank, target in enumerate(targets):
                assert target.engine.version == version
                assert same(models[rank], target.engine.model), "engine and rank of one number are on one GPU"
            for model in models:
                with torch.no_grad():
                    model[0].weight.add_(1.0)
        assert [len(weights.state[LINK].ends) for weights in source.ranks] == [1, 1]
        await plugin.close()
        assert all(LINK not in weights.state for weights in source.ranks)

    asyncio.run(scenario())
    assert not [record for record in caplog.records if "main memory" in record.message]


def test_several_senders_carry_the_buckets_in_turn(places, monkeypatch):
    routes = [Route("gloo", rank, (0, 1), rank, 2) for rank in range(2)]
    monkeypatch.setattr(Broadcast, "plan", lambda self, *ends: routes)
    models = [make_model(1), make_model(1)]
    source, targets = Ranks(models), targets_of([make_model(3), make_model(4)])
    monkeypatch.setattr(remote.SyncOptions, "wire", lambda self: {"bucket_bytes": 17_000, "dtype": None, "rename": {}})

    async def scenario():
        plugin = Broadcast(Broadcast.Options(timeout_s=60))
        await plugin.connect(targets)
        for version in range(3):
            await plugin.send(source, version)
            assert all(same(models[0], target.engine.model) for target in targets)
            layouts = [len(weights.state[LINK].ends[0].layouts) for weights in source.ranks]
            assert layouts == [3, 2], "five buckets, in turn"
            for copied in models:
                with torch.no_grad():
                    copied[1].weight.mul_(1.5)
        await plugin.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("way", [IPC, Broadcast])
def test_no_more_bits_are_sent_than_the_engines_keep(way):
    model, narrow = make_model(1), make_model(2).to(torch.bfloat16)
    narrow[4].to(torch.float32)  # as a router that is kept in more bits
    source, targets = LocalSource(model), targets_of([narrow])

    async def scenario():
        plugin = way(way.Options(timeout_s=60))
        await plugin.connect(targets)
        await plugin.send(source, 0)
        counts = [await plugin.sent(source) for _ in range(2)]
        await plugin.close()
        return counts

    (size, seconds), then = asyncio.run(scenario())
    per_layer = 64 * 64 + 64
    assert size == 4 * 2 * per_layer + 4 * per_layer
    assert 0 < seconds < 60
    assert then == (0, 0.0), "since the last call"
    for name, weight in narrow.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name].to(weight.dtype))
    assert torch.equal(narrow[4].weight, model[4].weight), "bit for bit"


def test_engines_of_different_types_get_what_the_trainer_has():
    model, narrow, wide = make_model(1), make_model(2).to(torch.bfloat16), make_model(3)

    async def scenario():
        plugin = IPC(IPC.Options(timeout_s=60))
        await plugin.connect(targets_of([narrow, wide]))
        await plugin.send(LocalSource(model), 0)
        await plugin.close()

    asyncio.run(scenario())
    assert same(model, wide)
    assert same(copy.deepcopy(model).to(torch.bfloat16), narrow)


# --- an end that fails ---------------------------------------------------------------------------


def serve(pipe, width):
    """An engine's process, which says when the second bucket of version 1 has come, and stands still."""
    from rlhf_host.engines.loading import ModuleLoader, copy_weights

    model = make_model(5, width)

    def replace(buckets, version):
        def watched():
            for number, bucket in enumerate(buckets):
                if number == 1 and version == 1:
                    pipe.send("now")
                    time.sleep(600)
                yield bucket

        copy_weights(model, watched())

    loader = ModuleLoader("engine", model, replace)
    while True:
        function, arguments = pipe.recv()
        try:
            pipe.send((True, call_by_path(function, loader, arguments)))
        except Exception as error:
            pipe.send((False, error))


class Process:
    """An engine in a process of its own, which gets a signal in the middle of version 1 and is gone for its runtime."""

    def __init__(self, signal, width):
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, width), daemon=True)
        self.process.start()
        theirs.close()
        self.version, self._signal, self.ended = -1, signal, 0.0

    async def run(self, function, **arguments):
        return [await asyncio.to_thread(self._call, function, arguments)]

    def _call(self, function, arguments):
        if not self.ended:
            self.pipe.send((function, arguments))
            answer = self.pipe.recv()
            if answer == "now":
                self.ended = time.monotonic()
                os.kill(self.process.pid, self._signal)
        if self.ended:
            raise RunError("the engine's process has ended")
        good, result = answer
        if not good:
            raise result
        return result

    def set_version(self, version):
        self.version = version


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hangs"])
def test_a_receiver_lost_in_the_middle_is_named_and_training_goes_on(sent):
    """With gloo between two processes. One that hangs leaves the broadcast waiting, as a killed one does with NCCL; NCCL itself is
    not measured on a GPU."""
    width = 1024
    model, engine = make_model(1, width), Process(sent, width)
    source = LocalSource(model)

    async def scenario():
        plugin = Broadcast(Broadcast.Options(timeout_s=120, bucket_mb=4, backend="gloo"))
        await plugin.connect([SyncTarget("e0", engine)])
        await plugin.send(source, 0)
        with pytest.raises(RunError, match=r"version 1 failed: .*engine e0: the engine's process has ended"):
            await plugin.send(source, 1)
        assert time.monotonic() - engine.ended < 10
        await plugin.close()

    try:
        asyncio.run(scenario())
    finally:
        engine.process.kill()
    before = model[0].weight.clone()
    model(torch.ones(2, width)).sum().backward()
    torch.optim.AdamW(model.parameters()).step()
    assert not torch.equal(before, model[0].weight)
    assert not [thread for thread in threading.enumerate() if thread.name == "rlhf-abort"], "nothing hangs"
