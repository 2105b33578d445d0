"""Parts that get Liger's kernels, and how; here the kernels' formulas stand in for Triton, so that this runs anywhere."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from rlhf_authoring import kernels_contract, model_inputs
from rlhf_kernels_liger import layers
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

FAMILIES = ("Llama", "Qwen3", "Gemma", "Gemma2", "Gemma3Text", "Olmo2")


@pytest.mark.usefixtures("stand_in")
class TestContract(kernels_contract("liger")):
    pass


def bound(twin) -> dict[str, int]:
    """Counts the parts of each class that were given a kernel."""
    names = [type(part).__name__ for part in twin.modules() if "forward" in vars(part)]
    return {name: names.count(name) for name in names}


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("family", FAMILIES)
def test_all_norms_and_mlps_are_found(family, build, kernels, use):
    model = build(family)
    assert kernels.unsuited(model, use) is None
    norms = sum("Norm" in type(part).__name__ for part in model.modules())
    found = bound(kernels.twin(model, use))
    assert sum(found.values()) == norms + 2
    assert len(found) == 2
    assert bound(model) == {}


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("Llama", (0.0, "llama")),
        ("Qwen3", (0.0, "llama")),
        ("Gemma", (1.0, "gemma")),
        ("Gemma3Text", (1.0, "gemma")),
        ("Olmo2", (0.0, "gemma")),
    ],
)
def test_norms_round_where_the_models_own_do(family, settings, build, kernels, use, formulas, monkeypatch):
    """The settings that a norm was bound with are those of every later call."""
    seen, norm = [], formulas.liger_rms_norm
    monkeypatch.setattr(formulas, "liger_rms_norm", lambda *arguments: (seen.append(arguments[3:]), norm(*arguments))[1])
    twin = kernels.twin(build(family), use)
    seen.clear()
    twin(torch.tensor([[1, 2, 3]], device=use.device))
    assert set(seen) == {(*settings, False)}


class Centred(LlamaRMSNorm):
    def forward(self, x):
        return super().forward(x - x.mean(-1, keepdim=True))


class Gated(LlamaRMSNorm):
    def forward(self, x, gate=None):
        return super().forward(x)


class Doubled(LlamaMLP):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.usefixtures("stand_in")
def test_parts_that_only_look_alike_stay_as_they_are(build, kernels, use):
    model = build("Llama")
    model.model.norm.__class__ = Centred
    model.model.layers[0].input_layernorm.__class__ = Gated
    model.model.layers[0].mlp.__class__ = Doubled
    model.model.layers[1].mlp.act_fn = nn.GELU()
    model.model.layers[1].input_layernorm.forward = lambda x: x
    assert bound(kernels.twin(model, use)) == {"LlamaRMSNorm": 3}  # one of them is the model's own forward
    ids = torch.tensor([[1, 2, 3]], device=use.device)
    torch.testing.assert_close(kernels.twin(model, use)(ids).logits, model(ids).logits)


@pytest.mark.usefixtures("stand_in")
def test_layer_norms_and_plain_mlps_are_not_for_it(kernels, use):
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.LayerNorm(4, bias=False))
    assert kernels.unsuited(nn.Sequential(model[0], model[1]), use) == "it has no root-mean-square norm and no gated MLP"
    assert bound(kernels.twin(model, use)) == {}, "a layer norm without a bias has the same parts and computes something else"


def test_without_a_gpu_it_is_refused(build, kernels, use, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if use.device.type == "cpu":
        assert kernels.unsuited(build("Llama"), use) == "Triton needs CUDA"


def test_neither_triton_nor_torch_is_imported_to_be_asked():
    program = (
        "import sys; from rlhf_kernels_liger import LigerKernels, Options; print(LigerKernels(Options()).traits.libraries, "
        "[name for name in ('torch', 'triton', 'liger_kernel') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "('liger_kernel', 'triton') []\n"


# --- Triton's own ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("triton_kernels")
@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_of_the_kernels_are_the_models_own(family, build, kernels, use):
    model = build(family)
    twin = kernels.twin(model, use)
    assert len(bound(twin)) == 2
    inputs, places = model_inputs([[1, 2, 3], [1, 2, 3]], [[4, 5, 6], [7]], shared=True, device=use.device)
    results = []
    for module in (model, twin):
        hidden = module.base_model(**inputs, use_cache=False).last_hidden_state.flatten(0, 1)[places]
        model.zero_grad()
        (hidden * torch.arange(hidden.numel(), device=use.device).view_as(hidden).sin()).sum().backward()
        results.append({"values": hidden.detach(), **{name: one.grad for name, one in model.base_model.named_parameters()}})
    assert len(results[0]) > 10
    for name, own in results[0].items():
        assert (results[1][name] - own).norm() <= 1e-5 * own.norm(), name


@pytest.mark.usefixtures("triton_kernels")
def test_the_stand_ins_compute_what_the_kernels_do(formulas, use):
    from liger_kernel.transformers import functional

    x, gate, up = (torch.randn(5, 24, device=use.device) for _ in range(3))
    weight = torch.randn(24, device=use.device)
    for offset, casting in layers.NORMS:
        for dtype in (torch.float32, torch.float16):
            arguments = (x.to(dtype), weight.to(dtype), 1e-5, offset, casting, False)
            assert (
                torch.equal(functional.liger_rms_norm(*arguments), formulas.liger_rms_norm(*arguments))
                or dtype == torch.float32
            )
            torch.testing.assert_close(functional.liger_rms_norm(*arguments), formulas.liger_rms_norm(*arguments))
    torch.testing.assert_close(functional.liger_swiglu(gate.clone(), up.clone()), formulas.liger_swiglu(gate, up))
    torch.testing.assert_close(functional.liger_geglu(gate.clone(), up.clone()), formulas.liger_geglu(gate, up))
