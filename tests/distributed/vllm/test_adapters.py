"""vLLM with the base and an adapter beside it: every version is another adapter, and none is ever mixed with an older one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from rlhf_authoring.models import tiny_tokenizer, write_tiny_model

from rlhf_host.backends.weights import adapter_buckets
from rlhf_host.config.schema import LoraOptions, RoleConfig
from rlhf_host.distributed.vllm.plugin import Vllm
from rlhf_host.engines.plain_path import PlainKernels
from rlhf_host.errors import RunError, UserError
from rlhf_host.models.adapters import adapter_layers
from rlhf_host.models.loading import load_model
from rlhf_host.protocols import EngineStart
from rlhf_host.records.episodes import Sampling
from rlhf_host.runtimes.compute import Inline

pytest.importorskip("vllm")
pytest.importorskip("peft")

PROMPT = list(range(3, 59)) * 2


def start(directory, rank):
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    settings = {"version": -1, "compute": Inline(), "kernels": PlainKernels(), "adapter_rank": rank}
    return Vllm(Vllm.Options()).start(EngineStart(model=directory, tokenizer=tokenizer, **settings))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """No token ends a completion, so that lengths are known."""
    directory = write_tiny_model(tmp_path_factory.mktemp("vllm") / "model", hidden=128)
    model = load_model(RoleConfig(model=str(directory)))
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def engine(directory):
    engine = start(directory, 4)
    yield engine
    asyncio.run(engine.close())


def adapted(directory, seed):
    """Adapters of two ranks, far from 0."""
    options = LoraOptions(rank=4, targets=["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"])
    model = load_model(RoleConfig(model=str(directory), lora=options), trainable=True)
    draw = torch.Generator().manual_seed(seed)
    for _, layer in adapter_layers(model):
        layer.lora_B["trained"].weight.data.normal_(0, 0.1, generator=draw)
    return model


def gap(model, generation):
    """Largest difference of log-probabilities from the trainer's."""
    ids = torch.tensor([[*PROMPT, *generation.token_ids]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(PROMPT) - 1 : -1].double()
    own = logits.log_softmax(-1).gather(1, torch.tensor(generation.token_ids)[:, None])[:, 0]
    return float((own - torch.tensor(generation.logprobs)).abs().max())


def test_every_version_is_sampled_as_the_trainer_computes_it(engine, directory):
    with pytest.raises(RunError, match="has no weights of this run"):
        asyncio.run(engine.generate(PROMPT, Sampling(2), (0,)))
    models = {version: adapted(directory, version) for version in range(3)}
    for version, model in models.items():
        engine.loader.load(adapter_buckets(model, 1000), version)
        made = asyncio.run(engine.generate(PROMPT, Sampling(16), (1,)))  # the same prompt: its blocks are in the cache
        assert set(made.versions) == {version}
        assert gap(model, made) < 1e-4
        assert min(gap(other, made) for number, other in models.items() if number != version) > 1e-3
    assert len([path for path in Path(engine._scratch.path).iterdir() if path.name.startswith("adapter-")]) == 1


def test_a_request_in_flight_begins_anew_under_the_new_adapter(engine, directory):
    old, new = adapted(directory, 10), adapted(directory, 11)
    engine.loader.load(adapter_buckets(old, 1000), 10)

    async def main():
        job = asyncio.create_task(engine.generate(PROMPT, Sampling(300), (2,)))
        begun = engine.busy_s
        while engine.busy_s == begun:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(engine.loader.load, adapter_buckets(new, 1000), 11)
        return await job

    made = asyncio.run(main())
    assert made.versions == [11] * 300
    assert gap(new, made) < 1e-4


def test_a_load_that_fails_leaves_the_engine_without_weights(engine, directory):
    with pytest.raises(RunError, match="loading version 20 failed"):
        engine.loader.load(iter([]), 20)
    with pytest.raises(RunError, match="has no weights of this run"):
        asyncio.run(engine.generate(PROMPT, Sampling(2), (0,)))
    model = adapted(directory, 21)
    engine.loader.load(adapter_buckets(model, 1000), 21)
    assert gap(model, asyncio.run(engine.generate(PROMPT, Sampling(8), (3,)))) < 1e-4


def test_ranks_that_vllm_does_not_take(directory):
    with pytest.raises(UserError, match="takes adapters up to rank 512, not 600"):
        start(directory, 600)
