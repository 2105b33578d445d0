"""Weights in 8 bits: vLLM's own arithmetic, what a sync brings, and that anything else is noticed."""

from __future__ import annotations

import asyncio
import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_host.backends.weights import named_weights
from rlhf_host.distributed.bits import compare_bits, kept_bits
from rlhf_host.distributed.sync.plugin import IPC, Broadcast, Checkpoint
from rlhf_host.distributed.sync.remote import BITS
from rlhf_host.distributed.vllm.arguments import QUANTIZATIONS
from rlhf_host.errors import RunError
from rlhf_host.protocols import SyncTarget
from rlhf_host.records.episodes import Sampling
from rlhf_host.weight_sync.local_source import LocalSource

from .rig import Rig, logprobs_of, make_engine, prompts_of, write_model

pytest.importorskip("vllm")

LAYER = "model.layers.1.mlp.down_proj"


def step(model, size=1e-4):
    """Moves weights as little as a step of the optimizer, far less than a step of int8 or fp8."""
    with torch.no_grad():
        for weight in model.parameters():
            weight += size * torch.randn(weight.shape, generator=torch.Generator().manual_seed(5)).sign()


# --- the arithmetic -----------------------------------------------------------------------------


def reference(weight, rounding, grid):
    """Codes and scales in float64, from the definition: ``w / (max |w| / largest)``, to the nearest of ``grid``."""
    scale = weight.abs().amax(1, keepdim=True).double().clamp(min=rounding.least) / rounding.largest
    return grid[((weight.double() / scale)[..., None] - grid).abs().argmin(-1)], scale


def grid_of(name):
    if name == "int8":
        return torch.arange(-127, 128, dtype=torch.float64)
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(torch.float8_e4m3fn).double()
    return codes[codes.isfinite()].unique()


matrices = st.tuples(
    st.integers(1, 12),
    st.integers(1, 40),
    st.integers(0, 2**31),
    st.sampled_from([1e-6, 0.02, 1.0, 300.0]),
    st.sampled_from([torch.bfloat16, torch.float32]),
)


@pytest.mark.parametrize("name", QUANTIZATIONS)
@given(shape=matrices)
@settings(max_examples=40, deadline=None)
def test_weights_are_rounded_as_vllm_rounds_them(name, shape):
    """Our rounding is that of the definition in float64, and of the functions with which vLLM quantizes."""
    from vllm.model_executor.layers.quantization.online import fp8
    from vllm.model_executor.layers.quantization.utils.quant_utils import weight_amax

    from rlhf_host.distributed.vllm import quantized

    methods = {"fp8": fp8.Fp8PtpcOnlineLinearMethod, "int8": quantized.Int8OnlineLinearMethod}
    rows, columns, seed, size, dtype = shape
    weight = (size * torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))).to(dtype)
    layer, rounding = SimpleNamespace(tp_size=1), quantized.ROUNDINGS[methods[name]]
    scale = rounding.scale(layer, weight)
    codes = rounding.code(weight / scale)
    nearest, exact_scale = reference(weight, rounding, grid_of(name))
    assert torch.allclose(scale.double(), exact_scale, rtol=1e-6, atol=0)
    scaled = weight.double() / exact_scale
    assert ((scaled - codes).abs() - (scaled - nearest).abs()).max() <= 1e-4, "the nearest code, or one as near"
    if name == "fp8":
        theirs = fp8._fp8_channel_scale(weight_amax(weight, dim=-1, keepdim=True))
        assert torch.equal(theirs, scale)
        assert torch.equal(fp8._fp8_quant_per_channel(weight, theirs).float(), codes)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_codes_below_the_normal_numbers_of_the_type_are_read_back(dtype, monkeypatch):
    """A layer that answers in its own type has its weights, whatever their size; another code of one of them is noticed."""
    from rlhf_host.distributed.vllm import quantized

    class Method:
        def process_weights_after_loading(self, layer):
            scale = rounding.scale(layer, layer.weight)
            layer.held = rounding.code(layer.weight / scale) * scale

        def apply(self, layer, inputs):
            return (inputs.float() @ layer.held.T).to(dtype)

    rounding = quantized.Rounding(448.0, floats=True, least=1 / 512)
    monkeypatch.setitem(quantized.ROUNDINGS, Method, rounding)
    layer = torch.nn.Linear(8, 64, bias=False)
    layer.quant_method, layer.input_size_per_partition, layer.orig_dtype, layer.tp_size = Method(), 8, dtype, 1
    weight = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)) * torch.logspace(-5, -1, 8)
    layer.weight.data = weight.to(dtype)
    model = torch.nn.Sequential(layer)
    proof = quantized.ReadBack(model)
    layer.quant_method.process_weights_after_loading(layer)
    proof.check()
    layer.quant_method.process_weights_after_loading(layer)
    layer.held *= torch.where(torch.arange(8) == 7, 1.25, 1.0)
    with pytest.raises(RunError, match="0 does not multiply with the weights that came"):
        proof.check()


# --- a sync -------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=list(QUANTIZATIONS))
def rig(request, tmp_path_factory):
    from transformers import AutoModelForCausalLM

    directory = write_model(tmp_path_factory.mktemp("vllm") / request.param, tied=False)
    rig = Rig(make_engine(directory, quantization=request.param), AutoModelForCausalLM.from_pretrained(directory))
    rig.sync(0)
    yield rig
    asyncio.run(rig.engine.close())


def gaps(rig, prompts, generations):
    """``|log μ − log π|`` of every token."""
    pairs = zip(prompts, generations, strict=True)
    return torch.cat(
        [(logprobs_of(rig.model, prompt, made.token_ids) - torch.tensor(made.logprobs)).abs() for prompt, made in pairs]
    )


def test_after_every_sync_it_samples_as_an_engine_that_loaded_the_saved_weights(rig, tmp_path):
    prompts = prompts_of(8, 70)
    for version in (1, 2):
        rig.train(version)
        rig.sync(version)
        found = rig.sample(prompts, Sampling(12))
        saved = write_model(tmp_path / str(version), tied=False)
        rig.model.save_pretrained(saved)
        fresh = make_engine(saved, version=0, quantization=rig.engine.options.quantization, multiprocess=True)
        try:
            expected = Rig(fresh, rig.model).sample(prompts, Sampling(12))
        finally:
            asyncio.run(fresh.close())
        assert [made.token_ids for made in found] == [made.token_ids for made in expected]
        assert [made.logprobs for made in found] == [made.logprobs for made in expected]
        gap = gaps(rig, prompts, found)
        assert 1e-4 < gap.mean() < 0.1
    assert not rig.engine.exact


def test_a_layer_that_keeps_weights_of_one_step_before_is_noticed(rig):
    """The step moves log-probabilities by far less than rounding does: what tells is that layers are read."""
    rig.sync(3)
    worker = rig.engine.llm.engine_core.engine_core.model_executor.driver_worker.worker
    method, old = worker.read_back.layers[LAYER].quant_method, rig.model.get_submodule(LAYER).weight.detach().clone()
    proof = method.process_weights_after_loading
    process, name = proof.args

    def keep(layer):
        layer.weight.data.copy_(old)
        process(layer)

    step(rig.model)
    method.process_weights_after_loading = partial(proof.func, keep, name)
    try:
        with pytest.raises(
            RunError, match=rf"{re.escape(LAYER)} does not multiply with the weights that came, quantized: \d+ of"
        ):
            rig.sync(4)
        assert rig.engine.version == -1
    finally:
        method.process_weights_after_loading = proof
    rig.sync(5)
    assert rig.engine.version == 5


@pytest.mark.parametrize("way", [IPC, Broadcast, Checkpoint])
def test_one_bit_that_changed_on_the_way_is_noticed(rig, way, tmp_path):
    engine = rig.engine
    load, target = engine.loader.load, SyncTarget("vllm", engine)

    def altered(buckets):
        for bucket in buckets:
            bucket = [(name, tensor.clone()) for name, tensor in bucket]
            for name, tensor in bucket:
                if name == f"{LAYER}.weight":
                    tensor.view(torch.int32)[0, 0] ^= 1
            yield bucket

    async def main():
        sync = way(way.Options(**({"directory": tmp_path} if way is Checkpoint else {"timeout_s": 60})))
        await sync.connect([target])
        await sync.send(source, 6)
        engine.loader.load = lambda buckets, version: load(altered(buckets), version)
        step(rig.model)
        try:
            with pytest.raises(
                RunError, match=rf"engine vllm did not receive the weights of version 7 .*: {re.escape(LAYER)}\.weight differs$"
            ):
                await sync.send(source, 7)
        finally:
            engine.loader.load = load
        await sync.send(source, 8)
        await sync.close()

    source = LocalSource(rig.model)
    asyncio.run(main())
    assert engine.version == 8


def load_altered(loader, file, version):
    """Runs beside the weights, in each of two processes: the second gets one bit of a weight otherwise."""
    weights = torch.load(file, weights_only=True)
    if loader.rank:
        weights[f"{LAYER}.weight"].view(torch.int32)[0, 0] ^= 1
    loader.load(iter([list(weights.items())]), version)


@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_two_devices_share_scales_and_each_has_its_proof(name, tmp_path):
    """Rows of ``o_proj`` and ``down_proj`` lie on both devices: one scale for each needs the largest weight of both."""
    from transformers import AutoModelForCausalLM

    directory = write_model(tmp_path / "model", tied=False)
    engine = make_engine(directory, quantization=name, tensor_parallel_size=2)
    rig = Rig(engine, AutoModelForCausalLM.from_pretrained(directory))
    source, sync, target = (
        LocalSource(rig.model),
        Checkpoint(Checkpoint.Options(directory=tmp_path)),
        SyncTarget("vllm", engine),
    )

    async def main():
        await sync.connect([target])
        await sync.send(source, 0)
        sums = await engine.run(f"{BITS}:kept_bits")
        assert sums[0] == sums[1] == kept_bits(source._weights)
        torch.save(dict(named_weights(rig.model)), tmp_path / "weights")
        await engine.run(f"{__name__}:load_altered", file=str(tmp_path / "weights"), version=1)
        one, other = await engine.run(f"{BITS}:kept_bits")
        with pytest.raises(RunError, match=rf"engine vllm did not receive the weights of version 1 .*: {re.escape(LAYER)}"):
            compare_bits(one, other, "vllm", 1)

    try:
        asyncio.run(main())
        prompts = prompts_of(4, 70)
        assert gaps(rig, prompts, rig.sample(prompts, Sampling(8))).mean() < 0.1
    finally:
        asyncio.run(engine.close())
