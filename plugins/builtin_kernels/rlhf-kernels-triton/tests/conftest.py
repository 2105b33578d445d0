"""The kernels: Triton's where they can run, else a stand-in that computes their formulas with torch."""

from __future__ import annotations

import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

import pytest
import rlhf_kernels_triton
import torch
import torch.nn.functional as F
import transformers as hf
from rlhf_kernels_triton import Options, TritonKernels
from torch import Tensor

from rlhf_host.protocols import Use

torch.set_num_threads(1)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
RUNS = importlib.util.find_spec("triton") is not None and (INTERPRETED or torch.cuda.is_available())
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def build_model(family: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(getattr(hf, f"{family}Config")(**SIZES | settings)).float().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * torch.randn_like(weight)) if weight.dim() == 1 else weight.mul_(4)
    return model.to(DEVICE)


@pytest.fixture(name="build")
def _build():
    return build_model


@pytest.fixture
def device() -> torch.device:
    return DEVICE


@pytest.fixture
def use() -> Use:
    return Use(purpose="train", device=DEVICE, dtype=torch.float32, autocast=None)


@pytest.fixture
def kernels() -> TritonKernels:
    return TritonKernels(Options())


@pytest.fixture
def triton_kernels() -> None:
    """The kernels themselves, on a GPU or by Triton's interpreter."""
    if not RUNS:
        pytest.skip("needs triton, and a GPU or TRITON_INTERPRET=1: make test-triton")


@pytest.fixture
def computing(request) -> None:
    """The kernels themselves where they run, else the stand-in."""
    if not RUNS:
        request.getfixturevalue("stand_in")


@pytest.fixture
def stand_in(monkeypatch) -> None:
    """Triton is not asked for."""
    module = ModuleType("rlhf_kernels_triton.kernels")
    for function in (norm, norm_backward, rotary, swiglu, swiglu_backward, logprobs, logprobs_backward):
        setattr(module, function.__name__, function)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(rlhf_kernels_triton, "kernels", module, raising=False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def norm(x, branch, weight, eps, offset, early, outputs) -> None:
    y, total, rstd = outputs
    if branch is not None:
        x = total.copy_(x + branch)
    rstd.copy_(torch.rsqrt(x.float().square().mean(-1) + eps).flatten())
    value = x.float() * rstd.view(*x.shape[:-1], 1)
    y.copy_((value.to(x.dtype).float() if early else value) * (weight.float() + offset))


def norm_backward(of_y, of_total, x, weight, rstd, offset, early, outputs) -> None:
    of_x, of_branch, of_weight = outputs
    factor = rstd.view(*x.shape[:-1], 1)
    value, g = x.float() * factor, of_y.float()
    if of_weight.numel():
        of_weight.copy_((g * (value.to(x.dtype).float() if early else value)).flatten(0, -2).sum(0))
    g = g * (weight.float() + offset)
    g = factor * (g - value * (g * value).mean(-1, keepdim=True)) + (0 if of_total is None else of_total.float())
    of_x.copy_(g)
    if of_branch.numel():
        of_branch.copy_(g)


def rotary(q, k, cos, sin, back, outputs) -> None:
    for x, out in zip((q, k), outputs, strict=True):
        first, second = x.float().chunk(2, -1)
        (c1, c2), (s1, s2) = (one.float().unsqueeze(1).chunk(2, -1) for one in (cos, sin))
        one, other = first * c1 - second * s1, second * c2 + first * s2
        if back:
            one, other = first * c1 + second * s2, second * c2 - first * s1
        out.copy_(torch.cat([one, other], -1))


def swiglu(gate, up, y) -> None:
    y.copy_(F.silu(gate.float()) * up.float())


def swiglu_backward(of_y, gate, up, outputs) -> None:
    g, s = gate.float(), gate.float().sigmoid()
    outputs[0].copy_(of_y.float() * up.float() * s * (1 + g * (1 - s)))
    outputs[1].copy_(of_y.float() * g * s)


def scaled(z: Tensor, scale: float, softcap: float | None, temperature: float) -> Tensor:
    z = z.float() * scale
    return (z if softcap is None else torch.tanh(z / softcap) * softcap) / temperature


def logprobs(z, targets, scale, softcap, temperature, with_entropy, outputs) -> None:
    x = scaled(z, scale, softcap, temperature)
    every = x.log_softmax(-1)
    outputs[0].copy_(every.gather(1, targets))
    outputs[1].copy_(-(every.exp() * every).sum(-1) if with_entropy else torch.full((len(z),), torch.nan))
    outputs[2].copy_(x.logsumexp(-1))


def logprobs_backward(z, targets, saved, gradients, scale, softcap, temperature) -> None:
    lses, entropy = saved
    of_logprobs, of_entropy = gradients
    every = scaled(z, scale, softcap, temperature) - lses[:, None]
    d = -every.exp() * of_logprobs.sum(1, keepdim=True)
    if of_entropy is not None:
        d -= of_entropy[:, None] * every.exp() * (every + entropy[:, None])
    d = d.scatter_add(1, targets, of_logprobs) * (scale / temperature)
    z.copy_(d if softcap is None else d * (1 - torch.tanh(z.float() * (scale / softcap)) ** 2))
