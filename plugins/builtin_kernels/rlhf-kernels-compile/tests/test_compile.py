"""Models and machines for which blocks are compiled, and passes of the host in compiled blocks."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers as hf
from pydantic import ValidationError
from rlhf_kernels_compile import CompiledBlocks, CompileOptions

from rlhf_host.internals import PlainKernels
from rlhf_host.protocols import Use

torch.set_num_threads(1)

TRAIN = Use(purpose="train", device=torch.device("cpu"), dtype=torch.float32, autocast=None)
SIZES = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def build(**changes):
    torch.manual_seed(0)
    return hf.MistralForCausalLM(hf.MistralConfig(**SIZES | {"sliding_window": 20} | changes)).eval()


@pytest.fixture
def model():
    return build()


@pytest.fixture
def kernels(monkeypatch):
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)  # the tests of vLLM leave it
    return CompiledBlocks(CompileOptions(backend="eager"))


@pytest.mark.parametrize(
    ("use", "reason"),
    [
        (TRAIN, None),
        (replace(TRAIN, purpose="sample"), "it makes no decoder"),
        (replace(TRAIN, even_passes=True), "every rank would measure for itself, and ranks might choose differently"),
    ],
)
def test_uses_that_it_is_not_for_are_refused(kernels, model, use, reason):
    assert kernels.unsuited(model, use) == reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda model: setattr(model.config, "_attn_implementation", "flex_attention"),
            "attention is flex_attention, not sdpa",
        ),
        (lambda model: setattr(model.model, "layers", torch.nn.Identity()), "it has no list of blocks"),
        (lambda model: model.model.layers[1].mlp.register_forward_hook(lambda *_: None), "a part of model.layers.1 has hooks"),
        (
            lambda model: setattr(model.model.layers[0].mlp, "forward", lambda x: x),
            "a part of model.layers.0 has another forward than its class",
        ),
        (
            lambda model: setattr(model.lm_head, "weight", torch.nn.Parameter(torch.ones(1, dtype=torch.int8), False)),
            "its weights are quantized",
        ),
    ],
)
def test_models_that_cannot_be_compiled_are_refused(kernels, model, change, reason):
    change(model)
    assert kernels.unsuited(model, TRAIN).startswith(reason)


def test_inductor_is_refused_where_nothing_can_compile_for_the_device(model, monkeypatch):
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    kernels = CompiledBlocks(CompileOptions())
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert kernels.unsuited(model, TRAIN) == "there is no C++ compiler (no-such-compiler)"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert kernels.unsuited(model, replace(TRAIN, device=torch.device("cuda"))) == "Triton is not installed"


@pytest.mark.parametrize("by", ["torch's setting", "the environment"])
def test_compiling_that_is_switched_off_is_told(kernels, model, by, monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1" if by == "the environment" else "0")
    with torch._dynamo.config.patch(disable=by == "torch's setting"):
        assert kernels.unsuited(model, TRAIN).startswith("torch.compile is switched off in this process")


def test_a_mode_of_another_backend_is_refused():
    with pytest.raises(ValidationError, match="backend eager has no mode max-autotune-no-cudagraphs: leave mode out"):
        CompileOptions(backend="eager", mode="max-autotune-no-cudagraphs")


def test_blocks_are_traced_once_for_all_layers_and_lengths(monkeypatch):
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    done = subprocess.run([sys.executable, Path(__file__).with_name("traced.py")], capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.returncode) == ("1\n", 0), done.stderr


# --- compiled -----------------------------------------------------------------------------------


def adapted():
    from peft import LoraConfig, get_peft_model

    model = build()
    get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    return model


def recomputing():
    model = build()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


@pytest.mark.parametrize("make", [build, adapted, recomputing, lambda: build().requires_grad_(False)])
def test_inductors_twin_passes_the_trial_and_is_measured(make, caplog):
    if shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler: g++")
    kernels, model = CompiledBlocks(CompileOptions()), make()
    twin = kernels.choose([("compile", kernels)], PlainKernels()).module(model, TRAIN)
    (line,) = [record.message for record in caplog.records if record.name == "rlhf_host.kernels"]
    assert "times as fast as the plain path" in line
    assert (twin is model) == ("are not used" in line)
