"""Experts are replayed where each model's own code chooses them: for every family, layout and slice, with its gradients."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rlhf_plugin_experts.passes import ROUTED, Pass
from rlhf_plugin_experts.routers import Routers, routers_of, routing_parts
from torch.nn.functional import pad

from rlhf_host.errors import RunError, UserError
from rlhf_host.models.heads import blocks_of
from rlhf_host.models.layouts import padded_layout, shared_layout
from rlhf_host.models.passes import Passes
from rlhf_host.models.preparation import recompute

from .miniatures import miniature

ONE_TOPK = """
    afmoe aria_text axk1 axk2 cohere2_moe deepseek_v2 deepseek_v3 deepseek_v32 dots1 ernie4_5_moe exaone_moe flex_olmo gemma4_text
    glm4_moe glm4_moe_lite glm_moe_dsa gpt_oss granitemoe granitemoe_swa granitemoehybrid granitemoeshared hunyuan_v1_moe hy_v3
    hy_v4 inkling_text jamba kimi_linear laguna lfm2_moe mellum mimo_v2_flash minimax minimax_m2 minimax_m3_vl_text mixtral
    nemotron_h olmoe qwen2_moe qwen3_5_moe_text qwen3_moe qwen3_next qwen4_exp_text solar_open
"""
REPLAYED = ONE_TOPK.split()
OTHERWISE = "does not choose experts by one topk of all their scores"
REFUSED = {
    **dict.fromkeys(("deepseek_v4", "doge-moe", "jetmoe", "llama4_text", "longcat_flash", "phimoe", "zaya"), OTHERWISE),
    **dict.fromkeys(("dbrx", "llama"), "has no layers that choose experts"),
}
VOCABULARY = 61
SHORT, LONG = [5, 6, 7], [8, 9, 10, 11, 12]
PROMPTS, LENGTHS = [SHORT, SHORT, LONG, [12], LONG], [4, 1, 6, 3, 5]


def rows():
    torch.manual_seed(1)
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    return torch.randint(1, 40, mask.shape), mask


def others(routers, tokens, seed=0):
    """``[tokens, layers, k]``: experts that no model chose; a layer without any has zeros, as in vLLM."""
    draw = np.random.default_rng(seed)
    routes = np.zeros((tokens, routers.count, routers.per_token), np.uint8)
    for layer in routers.layers:
        for token in range(tokens):
            routes[token, layer] = draw.permutation(routers.experts)[: routers.per_token]
    return routes


@contextlib.contextmanager
def forced(monkeypatch, routers, routes):
    """The same in another way: layers choose one after the other, and ``topk`` gives what ``routes`` say."""
    plain, left = torch.topk, list(routers.layers)

    def choose(scores, k, dim=-1, largest=True, sorted=True):
        if scores.shape != (len(routes), routers.experts) or k != routers.per_token:
            return plain(scores, k, dim, largest, sorted)
        wanted = torch.tensor(routes[:, left.pop(0)].astype(int)).view(*scores.shape[:-1], k)
        return torch.return_types.topk((torch.gather(scores, -1, wanted), wanted))

    with monkeypatch.context() as patch:
        patch.setattr(torch, "topk", choose)
        patch.setattr(torch.Tensor, "topk", lambda scores, k, dim=-1, **more: choose(scores, k, dim, **more))
        yield
    assert not left


def alone(monkeypatch, model, routes):
    """Log-probabilities of each row's completion by a pass over this row alone."""
    routers, (ids, mask) = routers_of(model), rows()
    for prompt, row, real, own in zip(PROMPTS, ids, mask, routes, strict=True):
        tokens = [*prompt, *row[real].tolist()]
        with forced(monkeypatch, routers, own):
            logits = model(input_ids=torch.tensor([tokens[:-1]]), use_cache=False).logits[0].float()
        yield logits.log_softmax(-1)[len(prompt) - 1 :].gather(1, row[real][:, None])[:, 0]


def replayed(passes, routes):
    traces = [{ROUTED: own} for own in routes]
    passes.around = lambda model, lengths, traces: routers_of(model).during(lengths, traces)
    return passes.forward(PROMPTS, *rows(), traces=traces).logprobs


def of_rows(model, seed=0):
    routers = routers_of(model)
    return [
        others(routers, len(prompt) + length - 1, seed + row)
        for row, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True))
    ]


def same_prompts(routes):
    """A prompt that rows share is computed once."""
    for first, row in ((0, 1), (2, 4)):
        size = min(len(PROMPTS[row]), len(routes[row]))
        routes[row][:size] = routes[first][:size]
    return routes


@pytest.mark.parametrize("name", REPLAYED)
def test_a_familys_own_code_computes_with_the_experts_that_are_replayed(monkeypatch, name):
    model = miniature(name)
    routers = routers_of(model)
    ids = torch.tensor([[5, 9, 3, 7, 8]])
    plain = model(input_ids=ids, use_cache=False).logits
    with routers.during([5], [{}]):
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, plain), "without experts it chooses itself"
    routes = others(routers, 5)
    with forced(monkeypatch, routers, routes):
        expected = model(input_ids=ids, use_cache=False).logits
    with routers.during([5], [{ROUTED: routes}]) as own:
        torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, expected)
    assert not torch.allclose(expected, plain, atol=1e-3)
    assert torch.stack(own.changed).any()
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, plain), "outside of a pass nothing is replaced"


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_family_that_chooses_otherwise_is_refused_by_name(name):
    model = miniature(name)
    with pytest.raises(UserError, match=f"{type(model).__name__} {REFUSED[name]}"), Routers(model).during([5]):
        model(input_ids=torch.tensor([[5, 9, 3, 7, 8]]), use_cache=False)


def test_the_gate_is_the_trainers_and_has_its_gradient():
    model = miniature("qwen3_moe", norm_topk_prob=True)
    routers = routers_of(model)
    seen = []
    block = next(iter(blocks_of(model).values())).mlp
    hook = block.experts.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1:]))
    logits = block.gate.register_forward_hook(lambda _, inputs, output: seen.append(output[0]))
    routes = others(routers, 5)
    with routers.during([5], [{ROUTED: routes}]):
        model(input_ids=torch.tensor([[5, 9, 3, 7, 8]]), use_cache=False).logits.sum().backward()
    hook.remove()
    logits.remove()
    scores, (taken, weights) = seen
    wanted = torch.tensor(routes[:, 0].astype(int))
    probabilities = scores.softmax(-1).gather(-1, wanted)
    assert torch.equal(taken, wanted)
    torch.testing.assert_close(weights, probabilities / probabilities.sum(-1, keepdim=True))
    assert block.gate.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("layout", ["on", "off", "one by one"])
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_every_token_keeps_its_own_experts(monkeypatch, name, layout):
    model = miniature(name)
    routes = same_prompts(of_rows(model))
    expected = list(alone(monkeypatch, model, routes))
    passes = Passes(model, shared_prefix="off" if layout != "on" else "on")
    if layout == "one by one":
        passes.prepare(max(map(len, PROMPTS)) + max(LENGTHS))
        passes._verdict = passes._verdict.__class__(None, None)
    found = replayed(passes, routes)
    for row, (own, length) in enumerate(zip(expected, LENGTHS, strict=True)):
        torch.testing.assert_close(found[row, :length], own, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_layers_that_are_computed_again_have_the_same_experts(monkeypatch, layers):
    """Also where a pass of the same model without replay lies between the forward and the backward pass."""
    model = miniature("qwen3_moe")
    routes = same_prompts(of_rows(model))
    torch.cat(list(alone(monkeypatch, model, routes))).sum().backward()
    expected = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    recompute(model, layers)
    model.eval()
    passes = Passes(model)
    logprobs = replayed(passes, routes)
    with torch.no_grad():
        model(input_ids=torch.tensor([[5, 9, 3]]), use_cache=False)
        replayed(passes, of_rows(model, seed=9))
    logprobs.sum().backward()
    for name, weight in model.named_parameters():
        if name in expected:
            torch.testing.assert_close(weight.grad, expected[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_slice_of_a_line_has_the_experts_of_its_tokens(count):
    tokens = [len(prompt) + length for prompt, length in zip(PROMPTS, LENGTHS, strict=True)]
    routes = [np.arange(size - 1)[:, None, None] + 20 * row for row, size in enumerate(tokens)]
    ids, mask = rows()
    line = shared_layout(PROMPTS, ids[mask], LENGTHS, [0, 0, 1, 2, 1])
    whole = Pass(tokens, [{ROUTED: own} for own in routes])
    whole.begin(line.inputs())
    assert whole.real.all()
    places = line.rows.back
    columns, owners = places % line.rows.length, places // line.rows.length
    wanted = torch.where(whole.known, columns + 20 * owners, -1)
    assert torch.equal(torch.where(whole.known, whole.routes[:, 0, 0].long(), -1), wanted)
    assert (~whole.known).sum() == len(PROMPTS), "the last token of each row, which no engine reads"
    length = line.input_ids.shape[1]
    size = -(-length // count)
    for part in range(count):
        inputs = line.inputs()
        rows_of = inputs["shared_rows"]
        padding = size * count - length
        inputs["shared_rows"] = SimpleNamespace(
            back=pad(rows_of.back, (0, padding)), length=rows_of.length, prompts=rows_of.prompts, lengths=rows_of.lengths
        )
        inputs["input_ids"] = pad(line.input_ids, (0, padding))[:, part * size : (part + 1) * size]
        own = Pass(tokens, whole.traces)
        own.begin(inputs | {"slices": SimpleNamespace(part=part)})
        here = slice(part * size, min(length, (part + 1) * size))
        assert torch.equal(own.known[: here.stop - here.start], whole.known[here])
        assert torch.equal(own.routes[own.known], whole.routes[here][whole.known[here]])
        assert not own.real[here.stop - here.start :].any()


def test_padding_and_a_row_without_experts_are_the_models_own_matter():
    ids, mask = rows()
    layout = padded_layout(PROMPTS, ids[mask], LENGTHS)
    tokens = [len(prompt) + length for prompt, length in zip(PROMPTS, LENGTHS, strict=True)]
    own = Pass(tokens, [{ROUTED: np.zeros((tokens[0] - 1, 1, 1), np.uint8)}, *[{}] * 4])
    own.begin(layout.inputs())
    assert own.real.sum() == sum(tokens)
    assert own.known.sum() == tokens[0] - 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda routes: routes[:, :1], "2 of at least . experts in 1 layers, and Qwen3MoeForCausalLM takes 2 of 4 in 2"),
        (lambda routes: routes[:, :, :1], "1 of at least . experts in 2 layers"),
        (lambda routes: routes + 4, "of at least . experts in 2 layers"),
    ],
    ids=["layers", "per token", "experts"],
)
def test_experts_of_another_model_are_refused(change, message):
    model = miniature("qwen3_moe")
    routes = change(others(routers_of(model), 5))
    with pytest.raises(RunError, match=message), routers_of(model).during([5], [{ROUTED: routes}]):
        pass


def test_attention_is_no_routing_part():
    for block in blocks_of(miniature("qwen3_moe")).values():
        assert routing_parts(block) == [block.mlp]
