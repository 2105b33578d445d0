"""Parts that get kernels, and how; where Triton cannot run, its formulas stand in for it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from rlhf_authoring import model_inputs
from rlhf_kernels import choose
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm

from rlhf_host.comparison import token_logprobs
from rlhf_host.functional import twin as plain_twin
from rlhf_host.internals import PlainKernels

WHOLE = {"norms": 5, "MLPs": 2, "attentions": 2, "layers": 2}
FAMILIES = {
    "Llama": WHOLE,
    "Qwen2": WHOLE,
    "Qwen3": WHOLE | {"norms": 9},
    "Mistral": WHOLE,
    "Gemma": {"norms": 5, "attentions": 2, "layers": 2},  # its MLPs have gelu
    "Gemma2": {"norms": 9, "attentions": 2},  # four norms in a layer
    "Olmo2": {"norms": 9, "MLPs": 2, "attentions": 2},  # norms after attention and MLP
    "Phi3": {"norms": 5, "attentions": 2},  # gate and up in one product
    "Cohere": {"MLPs": 2},  # layer norms, and neighbours turn together
    "GPT2": {},
}


def fused(twin) -> dict[str, int]:
    """Counts the parts of each kind that were given a kernel."""
    kinds = {"Norm": "norms", "MLP": "MLPs", "Attention": "attentions", "Layer": "layers"}
    names = [type(part).__name__ for part in twin.modules() if "forward" in vars(part)]
    found = [next(kind for word, kind in kinds.items() if word in name) for name in names]
    return {kind: found.count(kind) for kind in kinds.values() if kind in found}


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_are_found_by_what_they_compute(family, build, kernels):
    model = build(family)
    assert fused(kernels.twin(model, None)) == FAMILIES[family]
    assert fused(model) == {}


class Centred(LlamaRMSNorm):
    def forward(self, x):
        return super().forward(x - x.mean(-1, keepdim=True))


class Gated(LlamaRMSNorm):
    def forward(self, x, gate=None):
        return super().forward(x)


class Doubled(LlamaMLP):
    def forward(self, x):
        return 2 * super().forward(x)


class Dropping(LlamaDecoderLayer):
    def forward(self, hidden_states, **options):
        return nn.functional.dropout(super().forward(hidden_states, **options), 0.5, self.training)


@pytest.mark.usefixtures("computing")
def test_parts_that_only_look_alike_stay_as_they_are(build, kernels, use):
    model = build("Llama")
    model.model.norm.__class__ = Centred
    model.model.layers[0].input_layernorm.__class__ = Gated
    model.model.layers[0].mlp.__class__ = Doubled
    model.model.layers[1].__class__ = Dropping
    model.model.layers[1].mlp.act_fn = nn.GELU()
    twin = kernels.twin(model, use)
    assert fused(twin) == {"norms": 3, "attentions": 2}
    ids = torch.tensor([[1, 2, 3]], device=use.device)
    torch.testing.assert_close(twin(ids).logits, model(ids).logits)


@pytest.mark.usefixtures("computing")
def test_a_layer_with_a_multiplier_keeps_its_residual_and_has_the_other_kernels(build, kernels, use):
    model = build("Granite", residual_multiplier=0.5)
    twin = kernels.twin(model, use)
    assert fused(twin) == {"norms": 5, "MLPs": 2, "attentions": 2}
    ids = torch.tensor([[1, 2, 3]], device=use.device)
    torch.testing.assert_close(twin(ids).logits, model(ids).logits)


class Count(TorchDispatchMode):
    """Operations that read or write tensors, by name."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.usefixtures("computing")
def test_under_autocast_norms_and_rotary_embedding_write_what_products_read(build, kernels, use):
    """The residual stays in float32, and the last norm too, because others read it."""
    model, counts = build("Qwen2"), {}
    twin = kernels.twin(model, use)
    inputs, _ = model_inputs([[1, 2, 3]], [[4, 5]], shared=False, device=use.device)
    for name, module in (("plain", model), ("twin", twin)):
        with Count() as count, torch.autocast(use.device.type, torch.bfloat16), torch.no_grad():
            hidden = module.model(**inputs, use_cache=False).last_hidden_state
        assert hidden.dtype == torch.float32
        counts[name] = [each for each in count.names if each in ("_to_copy", "mul", "rms_norm", "rotary", "swiglu")]
    own = {name: counts["twin"].count(name) for name in ("rms_norm", "rotary", "swiglu")}
    assert own == {"rms_norm": 5, "rotary": 2, "swiglu": 2}
    weights_and_biases = 2 * (7 + 3)
    around = counts["twin"].count("_to_copy") - weights_and_biases  # positions and masks
    assert counts["plain"].count("_to_copy") - counts["twin"].count("_to_copy") >= 2 * 6
    assert around < 10


# The interpreter cuts numbers off in 16 bits where GPUs round them.
@pytest.mark.usefixtures("computing" if torch.cuda.is_available() else "stand_in")
def test_under_autocast_a_twin_is_as_near_to_32_bits_as_the_model(build, kernels, use):
    """Over several inputs, because one alone may be rounded luckily."""
    model = build("Llama", hidden_size=64)
    twin = kernels.twin(model, use)

    def results(module, ids, pull, autocast):
        with torch.autocast(use.device.type, torch.bfloat16, enabled=autocast):
            hidden = module.model(ids, use_cache=False).last_hidden_state
        return [hidden, *torch.autograd.grad((hidden.float() * pull).sum(), list(model.model.parameters()))]

    gaps = {"model": 0.0, "twin": 0.0}
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        ids, pull = torch.randint(40, (1, 16), generator=generator), torch.randn(1, 16, 64, generator=generator)
        ids, pull = ids.to(use.device), pull.to(use.device)
        exact = results(model, ids, pull, False)
        for name, module in (("model", model), ("twin", twin)):
            low = results(module, ids, pull, True)
            gaps[name] += sum(float((a - b).norm() / b.norm()) ** 2 for a, b in zip(low, exact, strict=True))
    assert 0 < gaps["twin"] <= 1.3 * gaps["model"]


@pytest.mark.usefixtures("computing")
@pytest.mark.parametrize("family", ["Llama", "Olmo2"])
def test_weights_in_16_bits_give_attention_queries_keys_and_values_of_one_type(family, build, kernels, use):
    """OLMo 2 has tables of positions in 32 bits, and rounds what they have turned."""
    model = build(family).bfloat16()
    twin = kernels.twin(model, use)
    assert fused(twin)["attentions"] == 2
    ids = torch.tensor([[1, 2, 3]], device=use.device)
    one, two = (module.model(ids, use_cache=False).last_hidden_state for module in (model, twin))
    assert one.dtype == two.dtype == torch.bfloat16
    torch.testing.assert_close(two, one, rtol=0.05, atol=0.05)


@pytest.mark.usefixtures("computing")
def test_adapters_compute_inside_the_kernels(build, kernels, use):
    from peft import LoraConfig, get_peft_model

    model = build("Llama")
    get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    twin = kernels.twin(model, use)
    assert fused(twin) == WHOLE
    ids = torch.tensor([[1, 2, 3]], device=use.device)
    torch.testing.assert_close(twin(ids).logits, model(ids).logits)
    gradients = []
    for module in (model, twin):
        model.zero_grad()
        module(ids).logits.square().sum().backward()
        gradients.append({name: one.grad for name, one in model.named_parameters() if one.grad is not None})
    assert len(gradients[0]) == 2 * 7 * 2
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("computing")
def test_a_sliding_window_is_the_models_own(build, kernels, use):
    model = build("Mistral", sliding_window=3)
    ids = torch.arange(1, 20, device=use.device)[None]
    own = model(ids).logits
    torch.testing.assert_close(kernels.twin(model, use)(ids).logits, own)
    assert not torch.allclose(own, build("Mistral", sliding_window=None)(ids).logits)


def test_norms_and_mlps_take_no_tokens(build, kernels, use):
    """Experts may get none."""
    layer = kernels.twin(build("Llama"), use).model.layers[0]
    none = torch.zeros(0, 32, device=use.device)
    assert layer.mlp(none).shape == layer.input_layernorm(none).shape == (0, 32)
    assert [each.shape for each in layer.post_attention_layernorm(none, none)] == [(0, 32)] * 2


def test_fake_weights_have_a_twin_whose_kernels_are_one_operation_each(build, kernels):
    """Nothing of Triton is asked for: others count launches and bytes of large models this way."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = build("Qwen2").cpu()
    with FakeTensorMode(allow_non_fake_inputs=True):
        for part in model.modules():
            for name, weight in part._parameters.items():
                part._parameters[name] = weight if weight is None else nn.Parameter(torch.empty(weight.shape))
            for name, buffer in part._buffers.items():
                part._buffers[name] = torch.empty(buffer.shape)
        twin = kernels.twin(model, None)
        with Count() as count, torch.autocast("cpu", torch.bfloat16):
            hidden = twin.model(torch.zeros(2, 5, dtype=torch.int64), use_cache=False).last_hidden_state
            hidden.sum().backward()
    assert fused(twin) == WHOLE
    names = ("rms_norm", "rms_norm_backward", "rotary", "swiglu", "swiglu_backward")
    assert [count.names.count(name) for name in names] == [5, 5, 4, 2, 2]


@pytest.mark.usefixtures("computing")
def test_a_twin_is_compiled_whole(build, kernels, use):
    """``fullgraph``: nothing of a layer is a break, and its rotary function is the twin's, not that of the model's file."""
    twin = kernels.twin(build("Qwen2"), use)
    layer, x = twin.model.layers[0], torch.randn(1, 5, 32, device=use.device)
    angles = twin.model.rotary_emb(x, torch.arange(5, device=use.device)[None])
    options = {"attention_mask": None, "position_embeddings": angles}
    expected = layer(x, **options)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, **options), expected)


def test_models_without_such_parts_are_not_for_it(kernels, use, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    assert kernels.unsuited(model, use) == "no root-mean-square norm, rotary embedding or SwiGLU"
    bare = nn.Sequential(nn.LayerNorm(4, bias=False))
    assert fused(kernels.twin(bare, use)) == {}, "a layer norm without a bias has the same parts and computes something else"


def test_what_it_cannot_run_on_is_refused_in_a_few_words(build, kernels, use, monkeypatch):
    from dataclasses import replace

    model = build("Llama")
    assert kernels.unsuited(model, replace(use, purpose="sample")) == "it makes no decoder"
    on_cpu = replace(use, device=torch.device("cpu"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert kernels.unsuited(model, on_cpu) == "Triton needs CUDA"
    assert kernels.token_logprobs(on_cpu) is None
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert kernels.unsuited(model, on_cpu) is None
    assert kernels.unsuited(model, replace(on_cpu, dtype=torch.float64)) == "it computes in 32 or 16 bits"


@pytest.mark.usefixtures("computing")
def test_they_are_chosen_for_the_model_and_for_its_head(build, kernels, use):
    chosen = choose([("triton", kernels)], PlainKernels())
    twin = chosen.module(build("Llama"), use)
    function = chosen.token_logprobs(use)
    assert fused(twin) == WHOLE
    assert function is not token_logprobs
    assert chosen.reports == [
        "kernels 'triton' are used to train LlamaForCausalLM",
        "kernels 'triton' compute log-probabilities",
    ]


def test_neither_triton_nor_torch_is_imported_to_be_asked():
    program = (
        "import sys; from rlhf_kernels_triton import TritonKernels, Options; print(TritonKernels(Options()).traits.libraries, "
        "[name for name in ('torch', 'triton') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "('triton',) []\n"


def test_a_copy_of_a_twin_has_its_kernels(build, kernels):
    assert fused(plain_twin(kernels.twin(build("Llama"), None))) == WHOLE
