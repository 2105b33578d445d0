"""Liger's kernels: Triton's where they can run, else a stand-in that computes their formulas with torch."""

from __future__ import annotations

import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from rlhf_kernels_liger import LigerKernels, Options
from torch import Tensor

from rlhf_host.protocols import Use

torch.set_num_threads(1)

INSTALLED = all(importlib.util.find_spec(name) for name in ("liger_kernel", "triton"))
INTERPRETED = INSTALLED and os.environ.get("TRITON_INTERPRET") == "1"
RUNS = INSTALLED and (INTERPRETED or torch.cuda.is_available())
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")

if INTERPRETED:
    import numpy
    import triton
    import triton.language as tl  # kernels, _rsqrt and _tanh among them, look for it beside themselves

SIZES: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def build_model(family: str) -> Any:
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(getattr(hf, f"{family}Config")(**SIZES)).float().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * torch.randn_like(weight)) if weight.dim() == 1 else weight.mul_(4)
    return model.to(DEVICE)


@pytest.fixture(name="build")
def _build():
    return build_model


@pytest.fixture
def use() -> Use:
    return Use(purpose="train", device=DEVICE, dtype=torch.float32, autocast=None)


@pytest.fixture
def kernels() -> LigerKernels:
    return LigerKernels(Options())


@pytest.fixture
def triton_kernels(monkeypatch) -> None:
    """The kernels themselves, on a GPU or by Triton's interpreter."""
    if not RUNS:
        pytest.skip("needs liger-kernel and triton, and a GPU or TRITON_INTERPRET=1: make test-triton")
    if INTERPRETED:
        _help_the_interpreter(monkeypatch)


@pytest.fixture
def formulas() -> ModuleType:
    """Gives what the kernels compute, in torch."""
    module = ModuleType("liger_kernel.transformers.functional")
    module.liger_rms_norm, module.liger_swiglu, module.liger_geglu = rms_norm, swiglu, geglu
    return module


@pytest.fixture
def stand_in(formulas, monkeypatch) -> None:
    """Neither Liger nor Triton is asked for."""
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, formulas.__name__, formulas)
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, casting_mode: str = "llama", in_place: bool = True):
    y = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    y = y.to(x.dtype).float() if casting_mode == "llama" else y
    return (y * (offset + weight.float())).to(x.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate.float()).to(up.dtype) * up


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate.float(), approximate="tanh").to(up.dtype) * up


def _help_the_interpreter(monkeypatch) -> None:
    """It hands numbers to kernels bare, where compiled ones get scalars of 32 bits, and has none of CUDA's own functions."""
    import liger_kernel.ops.geglu
    import liger_kernel.ops.rms_norm
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt

    def with_scalars(argument: Any) -> Any:
        if isinstance(argument, float):
            handle = interpreter.TensorHandle(numpy.array([argument], dtype=numpy.float32), tl.float32)
            return tl.tensor(handle, tl.float32)
        return convert(argument)

    monkeypatch.setattr(interpreter, "_implicit_cvt", with_scalars)
    monkeypatch.setattr(liger_kernel.ops.rms_norm, "rsqrt", triton.jit(_rsqrt))
    monkeypatch.setattr(liger_kernel.ops.geglu, "tanh", triton.jit(_tanh))


def _rsqrt(x):
    return tl.rsqrt(x)


def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1
