"""The embedded engine with a module of its own: weights by name, and none but this run's."""

from __future__ import annotations

import asyncio

import pytest
import torch
from rlhf_authoring.models import tiny_tokenizer

from rlhf_host.backends.weights import in_buckets, named_weights
from rlhf_host.engines.loading import copy_weights
from rlhf_host.engines.plain_path import PlainKernels
from rlhf_host.engines.transformers import Transformers
from rlhf_host.errors import RunError
from rlhf_host.protocols import EngineStart
from rlhf_host.records.episodes import Sampling
from rlhf_host.runtimes.compute import OneThread

from .rig import largest_gap, train


def make_engine(model, version=-1):
    start = EngineStart(model=model, tokenizer=tiny_tokenizer(), version=version, compute=OneThread(1), kernels=PlainKernels())
    return Transformers(Transformers.Options(autocast="off", max_wait_s=0.1)).start(start)


async def load_weights(engine, buckets, version):
    """As functions that ``engine.run`` calls do, in a thread beside."""
    await asyncio.to_thread(engine._loader.load, buckets, version)


def test_it_generates_once_it_has_weights_and_not_after_a_load_that_failed(load):
    async def scenario():
        theirs = load()
        engine = make_engine(load())
        with pytest.raises(RunError, match="has no weights of this run"):
            await engine.generate([3, 4], Sampling(2), (0,))
        train(theirs, 1)
        await load_weights(engine, in_buckets(named_weights(theirs), 2**20), 5)
        assert await largest_gap([engine], theirs, 5, count=8) <= 1e-4

        with pytest.raises(RunError, match="no weights came for"):
            await load_weights(engine, in_buckets(list(named_weights(theirs))[:-1], 2**20), 6)
        with pytest.raises(RunError, match="has no weights of this run"):
            await engine.generate([3, 4], Sampling(2), (0,))
        await load_weights(engine, in_buckets(named_weights(theirs), 2**20), 6)
        assert await largest_gap([engine], theirs, 6, count=8) <= 1e-4
        await engine.close()

    asyncio.run(scenario())


def test_requests_that_wait_while_a_load_fails_are_refused(load):
    async def scenario():
        engine = make_engine(load(), version=1)
        engine.expect(2)  # so the request waits for another
        waiting = asyncio.create_task(engine.generate([3, 4], Sampling(2), (0,)))
        await asyncio.sleep(0)
        with pytest.raises(RunError, match="no weights came"):
            await load_weights(engine, iter([]), 2)
        with pytest.raises(RunError, match="has no weights of this run"):
            await waiting
        await engine.close()

    asyncio.run(scenario())


def weights_of(model):
    return [(name, weight.clone()) for name, weight in named_weights(model)]


def test_weights_are_written_in_place(load):
    ours, theirs = load(), load()
    train(theirs, 2)
    places = [parameter.data_ptr() for parameter in ours.parameters()]
    copy_weights(ours, [weights_of(theirs)])
    assert [parameter.data_ptr() for parameter in ours.parameters()] == places
    assert all(torch.equal(weight, theirs.state_dict()[name]) for name, weight in ours.state_dict().items())


def test_a_tied_head_may_be_sent_or_left_out_but_not_differ(load):
    ours, theirs = load(True), weights_of(load(True))
    copy_weights(ours, [theirs])
    copy_weights(ours, [[(name, weight) for name, weight in theirs if name != "lm_head.weight"]])
    different = [(name, weight + (name == "lm_head.weight")) for name, weight in theirs]
    with pytest.raises(
        RunError, match=r"model\.embed_tokens\.weight and lm_head\.weight are tied here, but came with different"
    ):
        copy_weights(ours, [different])


def test_an_unknown_name_meets_its_neighbour(load):
    wrong = [(name.replace("norm", "nrm"), weight) for name, weight in weights_of(load())]
    with pytest.raises(RunError, match=r"no weight 'model\.layers\.0.*nrm.*did you mean .*norm.*--sync\.rename"):
        copy_weights(load(), [wrong])
