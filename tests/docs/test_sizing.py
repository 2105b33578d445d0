"""``docs/sizing.md``: its tables are what the program computes, and the program's formulas are the bytes of real tiny models.

This file, run as a script, is one of the two ranks whose memory under DeepSpeed is measured.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from rlhf_host.backends.one_process import OneProcess
from rlhf_host.backends.torch_backend import TorchBackend
from rlhf_host.config.schema import LoraOptions, RoleConfig
from rlhf_host.distributed.split.ports import reserved
from rlhf_host.distributed.split.ranks import Ranks
from rlhf_host.engines.decoding import PlainDecoder
from rlhf_host.models.adapters import attach
from rlhf_host.models.dtypes import master_of
from rlhf_host.models.heads import find_head
from rlhf_host.models.loading import load_model
from rlhf_host.models.masters import narrow
from rlhf_host.models.passes import Passes
from rlhf_host.protocols import BackendStart

from ..scripts_as_modules import load_script

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "sizing.md"
SHAPE = {"vocab_size": 50, "hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8, "num_key_value_heads": 2}
STAGES = [(stage, precision) for precision in ("fp32", "bf16") for stage in (1, 2, 3)]


@pytest.fixture(scope="module")
def sizing():
    return load_script("scripts/sizing.py")


@pytest.fixture(params=[LlamaConfig, Qwen2Config], ids=["llama", "qwen2"])
def config(request):
    return request.param(**SHAPE, num_hidden_layers=2)


def of(config, dtype=torch.float32):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).to(dtype).eval()


def nbytes(tensors):
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())


def test_the_page_has_the_tables_that_the_program_prints(sizing):
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    models = {name: sizing.sizes(config) for name, config in sizing.MODELS.items()}
    for heading, table in (sizing.tables(models) | {"What fits on several": list(sizing.planned_table())}).items():
        assert "\n".join(table) in "\n".join(lines), f"{heading}: copy it from python scripts/sizing.py"


def test_the_published_models_have_as_many_weights_as_are_published(sizing):
    counted = {name: sizing.sizes(config).parameters for name, config in sizing.MODELS.items()}
    assert counted == {
        "Qwen2.5-0.5B": 494_032_768,
        "Qwen2.5-1.5B": 1_543_714_304,
        "Qwen2.5-7B": 7_615_616_512,
        "Qwen2.5-32B": 32_763_876_352,
        "Llama-3.1-70B": 70_553_706_496,
    }


@pytest.mark.parametrize("way", ["TORCH", "TORCH_BF16"])
def test_the_torch_backend_has_as_many_bytes_a_weight(sizing, config, way):
    model = of(config)
    if way == "TORCH_BF16":
        narrow(model, torch.bfloat16)
    backend = TorchBackend(
        BackendStart(model=model, compute=model, head=(), role=RoleConfig(), total_updates=1, ranks=OneProcess())
    )
    loss = model(torch.tensor([[1, 2, 3]])).logits.sum()
    backend.backward(loss)
    masters = {id(master): master for each in model.parameters() if (master := master_of(each)) is not each}.values()
    gradients = nbytes(each.grad for each in map(master_of, model.parameters()))
    backend.step()
    states = (value for state in backend.optimizer.state.values() for value in state.values() if value.dim())
    held = nbytes([*model.parameters(), *masters]) + nbytes(states)
    count = sizing.sizes(config).parameters
    assert held == sizing.per_weight(sizing.HELD[getattr(sizing, way)], 1) * count
    assert held + gradients == sizing.per_weight(sizing.TRAINED[getattr(sizing, way)], 1) * count


def test_an_adapter_is_counted(sizing, config):
    model = of(config, torch.bfloat16)
    attach(model, LoraOptions(rank=4), "nowhere")
    trained = [each for each in model.parameters() if each.requires_grad]
    frozen = [each for each in model.parameters() if not each.requires_grad]
    sizes = sizing.sizes(config)
    assert 4.5 * nbytes(trained) == sizing.adapter(sizes, 4)  # weights in 16 bits, masters, gradients, two moments
    assert nbytes(frozen) == 2 * sizes.parameters


def test_weights_in_4_bits_are_counted(sizing, tmp_path):
    pytest.importorskip("bitsandbytes")
    config = LlamaConfig(**SHAPE, num_hidden_layers=2)
    of(config).save_pretrained(tmp_path)
    model = load_model(RoleConfig(model=str(tmp_path), dtype="bfloat16", quantize="4bit"))
    states = [each.quant_state for each in model.parameters() if hasattr(each, "quant_state")]
    constants = nbytes([each.absmax for each in states]) + nbytes([each.state2.absmax for each in states])
    measured = nbytes(model.parameters()) + constants
    assert measured == pytest.approx(sizing.quantized(sizing.sizes(config)), rel=1e-3)


@pytest.mark.parametrize(("dtype", "number"), [(torch.float32, 4.0), (torch.bfloat16, 2.0)])
def test_the_embedded_engine_caches_as_much(sizing, config, dtype, number):
    model = of(config, dtype)
    with torch.inference_mode():
        decoder = PlainDecoder(model, find_head(model))
        decoder.prefill([[3] * 10, [4] * 10])
    held = nbytes(tensor for pair in decoder.cache.layers_held.values() for tensor in pair)
    assert held == 20 * sizing.cache(sizing.sizes(config), number)


def kept(model, tokens, autocast):
    """Bytes that a pass keeps for the backward pass, without weights."""
    passes = Passes(model, autocast=torch.bfloat16 if autocast else None, shared_prefix="off")
    completion = torch.full((1, tokens // 2), 5)
    passes.prepare(tokens)
    own = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
    found = {}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in own:
            found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        passes.forward([[4] * (tokens - tokens // 2)], completion, completion > 0)
    return nbytes(found.values())


def per_layer(make, autocast):
    """Of a token: what a layer more and a token more bring together."""
    two, three = (kept(make(layers), 200, autocast) - kept(make(layers), 100, autocast) for layers in (2, 3))
    return (three - two) / 100


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
def test_a_layer_keeps_as_much_for_the_backward_pass(sizing, config, autocast):
    def plain(layers):
        return of(type(config)(**SHAPE, num_hidden_layers=layers))

    def checkpointing(layers):
        model = plain(layers)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    def adapted(layers):
        model = of(type(config)(**SHAPE, num_hidden_layers=layers), torch.bfloat16 if autocast else torch.float32)
        attach(model, LoraOptions(rank=16), "nowhere")
        return model

    sizes = sizing.sizes(config)
    assert per_layer(plain, autocast) == sizing.layer(sizes, autocast)
    assert per_layer(checkpointing, autocast) == 4 * sizes.hidden
    if autocast:
        assert per_layer(lambda layers: plain(layers).bfloat16(), None) < sizing.layer(sizes, autocast)
        assert per_layer(lambda layers: checkpointing(layers).bfloat16(), None) == 2 * sizes.hidden
        assert per_layer(adapted, autocast) <= sizing.layer(sizes, autocast)


def test_deepspeed_has_as_many_bytes_a_weight(sizing):
    pytest.importorskip("deepspeed")
    place = reserved("127.0.0.1")
    port = str(place.getsockname()[1])
    command = [sys.executable, "-m", __name__]
    ranks = [
        subprocess.Popen([*command, str(rank), port], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    outputs = [rank.communicate(timeout=400) for rank in ranks]
    place.close()
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    (line,) = [line for line in outputs[0][0].splitlines() if line.startswith("measured ")]
    names = [f"`deepspeed`, ZeRO {stage}" + (", `--backend.precision bf16`" * (kind == "bf16")) for stage, kind in STAGES]
    expected = [[sizing.per_weight(table[name], 2) for table in (sizing.TRAINED, sizing.HELD)] for name in names]
    assert json.loads(line.removeprefix("measured ")) == [pytest.approx(each, abs=0.05) for each in expected]


# --- the program of a rank ------------------------------------------------------------------------


def tensors():
    """The memory of every tensor there is: address → storage, which stays as long as somebody has this."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor):
            for each in (thing, thing.grad if thing.is_leaf else None):
                if each is not None and each.device.type == "cpu":
                    found[each.untyped_storage().data_ptr()] = each.untyped_storage()
    return found


def measure(stage, precision, ranks):
    """The most bytes per weight in a step of two micro-batches, and those after it."""
    from rlhf_host.distributed.deepspeed.plugin import DeepSpeed

    before = tensors()
    # With a norm there are two groups of weights, and DeepSpeed keeps all gradients until the step of the last one.
    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512, bias=False) for _ in range(4)], torch.nn.LayerNorm(512))
    count = sum(weight.numel() for weight in model.parameters())
    small = {"reduce_bucket_size": 1000, "allgather_bucket_size": 1000, "param_persistence_threshold": 0}
    options = DeepSpeed.Options(zero_stage=stage, precision=precision, **small)
    start = BackendStart(model=model, compute=model, head=(), role=RoleConfig(), total_updates=9, ranks=ranks)
    backend = DeepSpeed(options).start(start)
    optimizer = backend.engine.optimizer.optimizer
    plain_step, seen = optimizer.step, []

    def sample():
        seen.append(sum(storage.nbytes() for address, storage in tensors().items() if address not in before) / count)

    def step(*arguments, **keywords):
        result = plain_step(*arguments, **keywords)
        sample()
        return result

    def micro_batch(last):
        inputs = torch.ones(1, 512, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
        out = backend.run_pass(lambda: {"out": model(inputs)})["out"]
        backend.backward(out.float().sum() * 1e-3, last)

    micro_batch(last=True)
    backend.step()  # the optimizer's state is there from now on
    optimizer.step = step
    micro_batch(last=False)
    sample()
    micro_batch(last=True)
    backend.step()
    sample()
    optimizer.step = plain_step
    backend.engine.destroy()
    return max(seen), seen[-1]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    rank, port = map(int, sys.argv[1:])
    torch.set_num_threads(1)
    joined = Ranks.join(rank, 2, "127.0.0.1", port)
    print("measured", json.dumps([measure(stage, precision, joined) for stage, precision in STAGES]), flush=True)
