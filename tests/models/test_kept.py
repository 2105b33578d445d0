"""A token of the budget costs the same memory in a shared line as in padded rows."""

from __future__ import annotations

import pytest
import torch
import transformers

from rlhf_host.models.kept import recorded
from rlhf_host.models.passes import Passes

SIZES = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 64, "max_position_embeddings": 2048}
SHAPES = [(512, 8, 256), (1024, 16, 64), (1024, 64, 16)]
"""Prompt, completions, tokens of each."""


def make_model(layers=1, key_heads=1):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=key_heads)
    return transformers.LlamaForCausalLM(config).eval()


def kept_and_cost(passes, prompt, count, length):
    """Bytes that a pass over a group's rows keeps, and its cost."""
    prompts, ids = [[1] * prompt] * count, torch.ones(count, length, dtype=torch.int64)
    passes.prepare(16)
    passes._prepared_for = prompt + length, False  # trials of long rows take longer than the pass
    with recorded(passes.model) as kept:
        outputs = passes.forward(prompts, ids, torch.ones_like(ids, dtype=torch.bool))
    assert outputs.logprobs.requires_grad
    return sum(kept.values()), passes.cost(prompts, [length] * count)


@pytest.mark.parametrize(("shape", "key_heads"), [*((shape, 1) for shape in SHAPES), (SHAPES[1], 2)])
def test_a_shared_line_keeps_what_padded_rows_of_its_cost_keep(shape, key_heads):
    model = make_model(key_heads=key_heads)
    kept, cost = kept_and_cost(Passes(model, shared_prefix="off"), 256, 2, 64)
    padded = kept / cost
    kept, cost = kept_and_cost(Passes(model), *shape)
    assert 0.8 * padded <= kept / cost <= 1.2 * padded, f"{kept / cost / padded:.2f} times the bytes of a padded token"


def test_layers_that_compute_again_keep_their_inputs_and_one_layer():
    """At most the inputs of all layers, and everything that one layer keeps while it is computed again, are held at once."""

    def needed(shared_prefix, *shape):
        one, model = make_model(1), make_model(4)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        inputs, cost = kept_and_cost(Passes(model, shared_prefix=shared_prefix), *shape)
        layer, _ = kept_and_cost(Passes(one, shared_prefix=shared_prefix), *shape)
        return (inputs + layer) / cost

    times = needed("auto", 256, 32, 8) / needed("off", 64, 2, 16)
    assert 0.8 <= times <= 1.2, f"{times:.2f} times the bytes of a padded token"


def test_a_frozen_model_has_the_cost_that_it_has_where_it_is_trained_and_stays_frozen():
    trained, frozen = make_model(), make_model().requires_grad_(False)
    assert Passes(trained)._gathered[trained] == Passes(frozen)._gathered[frozen]
    assert not any(weight.requires_grad for weight in frozen.parameters())


def test_checkpointing_is_on_again_after_the_measurement():
    model = make_model()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert 0 < Passes(model)._gathered[model] < 1
    assert model.is_gradient_checkpointing
    assert all(layer.gradient_checkpointing for layer in model.model.layers)


def test_rows_of_a_model_whose_attention_fails_cost_as_much_as_padded_ones():
    bloom = transformers.BloomForCausalLM(transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=61))
    assert Passes(bloom)._gathered[bloom] == 1.0


def test_what_was_measured_leaves_no_graph_that_knows_the_weights_shapes():
    """A backend may split a weight afterwards."""
    model = make_model()
    Passes(model)
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.data = weight.data[:64].clone()
    (torch.ones(3, SIZES["hidden_size"]) @ weight.t()).sum().backward()
    assert weight.grad.shape == (64, SIZES["hidden_size"])
