"""A token of the budget costs the same memory in a shared line as in padded rows, or less."""

from __future__ import annotations

import weakref

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlhf_host.models.activation_memory import Gathered, recorded
from rlhf_host.models.passes import Passes

SIZES = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 64, "max_position_embeddings": 2048}
SHAPES = [(512, 8, 256), (1024, 16, 64), (1024, 64, 16)]
"""Prompt, completions, tokens of each."""


class Peak(TorchDispatchMode):
    """Most bytes of the storages that operations made, at once."""

    def __init__(self):
        super().__init__()
        self.bytes = self.now = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage._cdata not in self._known:
                self._known[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                self.bytes = max(self.bytes, self.now)
                weakref.finalize(storage, self._freed, storage._cdata)
        return result

    def _freed(self, key):
        self.now -= self._known.pop(key)


def make_model(layers=1, key_heads=1, checkpointing=False, **sizes):
    torch.manual_seed(0)
    sizes = {"num_attention_heads": 2, **SIZES, **sizes}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=layers, num_key_value_heads=key_heads)
    model = transformers.LlamaForCausalLM(config).eval()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def forward(passes, prompt, count, length):
    """Log-probabilities of a group's rows, and the tokens of their line and of padded rows."""
    prompts, ids = [[1] * prompt] * count, torch.ones(count, length, dtype=torch.int64)
    passes.prepare(16)
    passes._prepared_for = prompt + length, False  # trials of long rows take longer than the pass
    logprobs = passes.forward(prompts, ids, torch.ones_like(ids, dtype=torch.bool)).logprobs
    assert logprobs.requires_grad
    padded = count * (prompt + length - 1)
    return logprobs, (prompt + count * (length - 1) if passes.shared_prefix != "off" else padded, padded)


def kept_and_tokens(passes, *shape):
    """Bytes that a pass over a group's rows keeps, and how many padded tokens keep as many."""
    with recorded(passes.model) as kept:
        _, sizes = forward(passes, *shape)
    return sum(kept.values()), passes._gathered[passes.model].cached_tokens(*sizes) if passes._gathered else sizes[1]


def peak_and_cost(passes, *shape):
    """Bytes that a pass over a group's rows needs at once, with its backward pass, and its cost."""
    for weight in passes.model.parameters():
        weight.grad = torch.zeros_like(weight)
    with Peak() as peak:
        forward(passes, *shape)[0].sum().backward()
    return peak.bytes, passes.cost([[1] * shape[0]] * shape[1], [shape[2]] * shape[1])


@pytest.mark.parametrize(("shape", "key_heads"), [*((shape, 1) for shape in SHAPES), (SHAPES[1], 2)])
def test_a_shared_line_keeps_what_padded_rows_of_its_cost_keep(shape, key_heads):
    model = make_model(key_heads=key_heads)
    kept, tokens = kept_and_tokens(Passes(model, shared_prefix="off"), 256, 2, 64)
    padded = kept / tokens
    kept, tokens = kept_and_tokens(Passes(model), *shape)
    assert 0.8 * padded <= kept / tokens <= 1.2 * padded, f"{kept / tokens / padded:.2f} times the bytes of a padded token"


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_shared_line_needs_no_more_memory_at_once_than_padded_rows_of_its_cost(shape, checkpointing):
    """On CPUs less: the kernels of GPUs need more for gradients (``gpu_accept.py --part budget``)."""
    model = make_model(4, checkpointing=checkpointing, intermediate_size=384)
    peak, cost = peak_and_cost(Passes(model, shared_prefix="off"), 256, 8, 64)
    padded = peak / cost
    peak, cost = peak_and_cost(Passes(model, shared_prefix="on"), *shape)
    assert 0.5 * padded <= peak / cost <= 1.05 * padded, f"{peak / cost / padded:.2f} times the bytes of a padded token"


def test_gradients_of_gathered_rows_cost_as_much_as_was_measured_on_a_gpu():
    """Bytes of a padded token of 1.5B on an H200, 64 answers of 16 tokens to 1,024 with checkpointing: 412 of each of 4,680."""
    cost = Gathered(share=0.0418, inputs=0.234).cost(1984, 66496)
    assert cost == pytest.approx(4680 * 412 / 210, rel=0.1)
    assert Gathered(share=0.0418, inputs=0.234).cost(2552, 6136) == 2702, "long answers: what is kept is the most"


def test_layers_that_compute_again_keep_their_inputs_and_one_layer():
    """At most the inputs of all layers, and everything that one layer keeps while it is computed again, are held at once."""

    def needed(shared_prefix, *shape):
        one, model = make_model(1), make_model(4, checkpointing=True)
        inputs, tokens = kept_and_tokens(Passes(model, shared_prefix=shared_prefix), *shape)
        layer, _ = kept_and_tokens(Passes(one, shared_prefix=shared_prefix), *shape)
        return (inputs + layer) / tokens

    times = needed("auto", 256, 32, 8) / needed("off", 64, 2, 16)
    assert 0.8 <= times <= 1.2, f"{times:.2f} times the bytes of a padded token"


def test_a_frozen_model_has_the_cost_that_it_has_where_it_is_trained_and_stays_frozen():
    trained, frozen = make_model(), make_model().requires_grad_(False)
    assert Passes(trained)._gathered[trained] == Passes(frozen)._gathered[frozen]
    assert not any(weight.requires_grad for weight in frozen.parameters())


def test_checkpointing_is_on_again_after_the_measurement():
    model = make_model(checkpointing=True)
    assert 0 < Passes(model)._gathered[model].share < 1
    assert model.is_gradient_checkpointing
    assert all(layer.gradient_checkpointing for layer in model.model.layers)


def test_rows_of_a_model_whose_attention_fails_cost_as_much_as_padded_ones():
    bloom = transformers.BloomForCausalLM(transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=61))
    gathered = Passes(bloom)._gathered[bloom]
    assert (gathered.cached_tokens(10, 100), gathered.cost(10, 100)) == (100, 100)


def test_what_was_measured_leaves_no_graph_that_knows_the_weights_shapes():
    """A backend may split a weight afterwards."""
    model = make_model()
    Passes(model)
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.data = weight.data[:64].clone()
    (torch.ones(3, SIZES["hidden_size"]) @ weight.t()).sum().backward()
    assert weight.grad.shape == (64, SIZES["hidden_size"])
