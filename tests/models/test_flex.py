"""FlexAttention over shared lines gives what each row gives alone. It has no backward pass on CPUs: ``gpu_accept`` has that."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo
from torch.nn.attention.flex_attention import flex_attention
from transformers import AutoModelForCausalLM, Gemma2Config
from transformers.integrations import flex_attention as integration

from rlhf_host.config.schema import RoleConfig
from rlhf_host.errors import UserError
from rlhf_host.models.attention import VERSIONS, attend, attend_blocks
from rlhf_host.models.layouts import shared_layout, sharing_of
from rlhf_host.models.loading import load_model
from rlhf_host.models.passes import Passes

WIDTH = 16
PROMPTS = [[1] * 40, [1] * 40, [2] * 7, [3], [1] * 40, [2] * 7]
LENGTHS = [9, 30, 1, 12, 0, 25]


def line():
    sharing = sharing_of(PROMPTS, None)
    return shared_layout(PROMPTS, torch.ones(sum(LENGTHS), dtype=torch.int64), LENGTHS, sharing).rows


def by_rows(rows, query, key, value, window, softcap):
    """Every row alone, in float64."""
    count = query.shape[1] // key.shape[1]
    out = torch.full_like(query, float("nan"), dtype=torch.float64)
    for row in range(rows.count):
        size = len(PROMPTS[row]) + LENGTHS[row]
        places = rows.gather.view(rows.count, -1)[row, :size]
        own, keys, values = (part[0, :, places].double() for part in (query, key, value))
        keys, values = keys.repeat_interleave(count, 0), values.repeat_interleave(count, 0)
        scores = own @ keys.transpose(1, 2) * WIDTH**-0.5
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        at = torch.arange(size)
        distance = at[:, None] - at
        seen = (distance >= 0) & (distance < window if window else True)
        out[0, :, places] = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values
    return out.transpose(1, 2)


@pytest.mark.parametrize("heads", [8, 2, 1])
@pytest.mark.parametrize("window", [None, 5, 1000])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_every_mask_gives_what_rows_give_alone(monkeypatch, heads, window, softcap):
    monkeypatch.setattr(
        integration, "compile_friendly_flex_attention", lambda *parts, training, **named: flex_attention(*parts, **named)
    )
    rows, generator = line(), torch.Generator().manual_seed(0)
    count = len(rows.back)
    query, key, value = (torch.randn(1, number, count, WIDTH, generator=generator) for number in (8, heads, heads))
    module = SimpleNamespace(training=False, num_key_value_groups=8 // heads, is_causal=True)
    more = {"sliding_window": window, "softcap": softcap, "scaling": WIDTH**-0.5}
    found, _ = attend_blocks(module, query, key, value, torch.ones(1, 1, 1, 1), rows, **more)
    assert torch.allclose(found.double(), by_rows(rows, query, key, value, window, softcap), atol=1e-5)
    if softcap is None:
        gathered, _ = attend(module, query, key, value, None, rows, sliding_window=window, scaling=WIDTH**-0.5)
        assert torch.allclose(found, gathered, atol=1e-5)


def test_training_on_a_cpu_is_refused(tiny_model):
    with pytest.raises(UserError, match="attn_implementation flex_attention has no backward pass on CPUs: choose sdpa"):
        load_model(RoleConfig(model=str(tiny_model), device="cpu", attn_implementation="flex_attention"), trainable=True)


def test_a_model_shares_prompts_under_it(tmp_path, recwarn):
    """Compiled, as in a run: with windows and capped scores, which sdpa would leave out."""
    config = Gemma2Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=8,
        attn_logit_softcapping=2.0,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    completions = torch.randint(0, 64, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    said = []
    for kernel in ("eager", "flex_attention"):
        model = load_model(RoleConfig(model=str(tmp_path), device="cpu", attn_implementation=kernel))
        passes = Passes(model, shared_prefix="on" if kernel == "flex_attention" else "off")
        passes.prepare(80)
        with torch.no_grad():
            said.append(passes.forward(PROMPTS, completions, mask).logprobs)
    assert torch.allclose(*said, atol=1e-4)
    assert not [each for each in recwarn if "cannot share" in str(each.message)]


def test_every_thread_may_compile_more_versions_than_torch_allows(monkeypatch):
    """Beyond torch's limit all scores are computed in memory, and rounded so that a trial refuses them; seen on a GPU."""
    limits = []

    def attention(query, *parts, training, **named):
        limits.append(torch._dynamo.config.recompile_limit)
        return query

    monkeypatch.setattr(integration, "compile_friendly_flex_attention", attention)
    module = SimpleNamespace(training=False, num_key_value_groups=1, is_causal=True)
    query = torch.randn(1, 1, 4, WIDTH)
    thread = threading.Thread(target=attend_blocks, args=(module, query, query, query, None))
    with torch._dynamo.config.patch(recompile_limit=8):
        thread.start()
        thread.join()
    assert limits == [VERSIONS]
