"""A pass gives what each row alone, through transformers, gives: whatever the layout, the padding and the neighbours."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rlhf_host.errors import UserError
from rlhf_host.models import logprobs as logprobs_module
from rlhf_host.models.heads import find_head
from rlhf_host.models.passes import Passes
from rlhf_host.models.preparation import remove_dropout
from rlhf_host.records.tensors import TopK
from rlhf_host.records.token_sets import pack_tokens, support_trace

VOCABULARY = 61
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
}
SHARING = {
    "llama": transformers.LlamaConfig(**SIZES),
    "llama-tied": transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen2": transformers.Qwen2Config(**SIZES),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=8),
    "gemma2": transformers.Gemma2Config(
        **SIZES, head_dim=8, sliding_window=64, final_logit_softcapping=0.5, attn_logit_softcapping=None
    ),
    "cohere": transformers.CohereConfig(**SIZES, logit_scale=0.25),
    "granite": transformers.GraniteConfig(**SIZES, logits_scaling=4.0),
    "phi-bias": transformers.PhiConfig(**SIZES),
    "gpt2": transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=VOCABULARY, n_positions=128),
    "mixtral": transformers.MixtralConfig(**SIZES, num_local_experts=4),
}
NOT_SHARING = {
    "mamba": transformers.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=VOCABULARY),
    "bloom-alibi": transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=VOCABULARY),
    "lfm2-conv": transformers.Lfm2Config(**SIZES, layer_types=["conv", "full_attention"]),
    "llama-eager": transformers.LlamaConfig(**SIZES, attn_implementation="eager"),
}
ALL = SHARING | NOT_SHARING
LM = frozenset({"logprobs", "entropy"})

SHORT, LONG = [5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]
PROMPTS = [SHORT, LONG, SHORT, LONG, SHORT, [20], LONG]
LENGTHS = [7, 3, 5, 0, 2, 4, 6]


def make_model(name: str, **changes):
    torch.manual_seed(0)
    config = ALL[name]
    model = transformers.AutoModelForCausalLM.from_config(config, **changes).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # so that every part of the model matters
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def make_scalar_model(pad_token_id=0):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, num_labels=1, pad_token_id=pad_token_id)
    return transformers.AutoModelForSequenceClassification.from_config(config).eval()


@pytest.fixture
def rows():
    torch.manual_seed(1)
    ids = torch.randint(VOCABULARY, (len(PROMPTS), max(LENGTHS)))
    return ids, torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]


def forward(model, *arguments, shared_prefix="auto", autocast=None, **options):
    return Passes(model, shared_prefix=shared_prefix, autocast=autocast).forward(*arguments, **options)


def one_by_one(model, ids: Tensor, mask: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logprobs, entropy = torch.zeros(ids.shape), torch.zeros(ids.shape)
    for row, prompt in enumerate(PROMPTS):
        own = ids[row, mask[row]]
        if len(own):
            logits = model(torch.tensor([[*prompt, *own.tolist()]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
            every = torch.log_softmax(logits.float() / temperature, -1)
            logprobs[row, : len(own)] = every.gather(-1, own[:, None]).squeeze(-1)
            entropy[row, : len(own)] = -(every.exp() * every).sum(-1)
    return logprobs, entropy


def gradients(model, loss: Tensor) -> Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def assert_same_gradients(found: Tensor, expected: Tensor, relative: float = 1e-5) -> None:
    assert (found - expected).norm() <= relative * expected.norm()


@pytest.mark.parametrize("shared_prefix", ["off", "auto"])
@pytest.mark.parametrize("name", ALL)
def test_values_and_gradients_are_those_of_each_row_alone(name, shared_prefix, rows):
    model = make_model(name)
    ids, mask = rows
    pull = torch.randn(2, *ids.shape) * mask
    logprobs, entropy = one_by_one(model, ids, mask, 0.7)
    expected = gradients(model, (pull[0] * logprobs + pull[1] * entropy).sum())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if name in NOT_SHARING else "error", UserWarning)
        found = forward(model, PROMPTS, ids, mask, temperature=0.7, outputs=LM, shared_prefix=shared_prefix, entropy_grad=True)
    torch.testing.assert_close(found.logprobs, logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.entropy, entropy, rtol=1e-5, atol=1e-5)
    assert_same_gradients(gradients(model, (pull[0] * found.logprobs + pull[1] * found.entropy).sum()), expected, 2e-5)


def truncated(ids: Tensor, mask: Tensor) -> tuple[list[dict], Tensor]:
    """Traces of rows, one without any, whose sets have their tokens; and where these allow a token, ``[B, T, V]``."""
    draw, traces, allowed = np.random.default_rng(3), [], torch.ones(*ids.shape, VOCABULARY, dtype=torch.bool)
    for row, prompt in enumerate(PROMPTS):
        sets = []
        for place, token in enumerate(ids[row, mask[row]].tolist() if row != 2 else ()):
            some = np.unique([token, *draw.permutation(VOCABULARY)[: draw.integers(1, VOCABULARY)]])
            sets.append(pack_tokens(some))
            allowed[row, place] = False
            allowed[row, place, some] = True
        traces.append(support_trace(len(prompt), sets) if row != 2 else {})
    return traces, allowed


@pytest.mark.parametrize("shared_prefix", ["off", "auto"])
@pytest.mark.parametrize("name", ["llama-tied", "gemma2", "cohere", "phi-bias", "mamba", "bloom-alibi"])
def test_replayed_support_gives_the_values_and_gradients_of_these_tokens_alone(name, shared_prefix, rows):
    model = make_model(name)
    ids, mask = rows
    traces, allowed = truncated(ids, mask)
    pull = torch.randn(2, *ids.shape) * mask
    whole = forward(model, PROMPTS, ids, mask, outputs=frozenset({"logits"}), shared_prefix="off").logits
    every = (whole / 0.7).masked_fill(~allowed, -torch.inf).log_softmax(-1)
    logprobs = every.gather(-1, ids[..., None]).squeeze(-1).where(mask, 0.0)
    entropy = -(every.exp() * every.masked_fill(~allowed, 0.0)).sum(-1) * mask
    collision = every.exp().square().sum(-1) * mask
    expected = gradients(model, (pull[0] * logprobs + pull[1] * entropy).sum())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        settings = {"outputs": LM, "shared_prefix": shared_prefix, "entropy_grad": True, "traces": traces}
        found = forward(model, PROMPTS, ids, mask, temperature=0.7, **settings)
        settings |= {"outputs": LM | {"collision"}, "entropy_grad": False}
        with torch.no_grad():
            other = forward(model, PROMPTS, ids, mask, temperature=0.7, **settings).collision
    torch.testing.assert_close(found.logprobs, logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.entropy, entropy, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(other, collision, rtol=1e-4, atol=1e-5)
    assert_same_gradients(gradients(model, (pull[0] * found.logprobs + pull[1] * found.entropy).sum()), expected, 2e-5)


def test_distributions_of_other_roles_are_compared_as_a_whole(rows):
    model = make_model("llama")
    ids, mask = rows
    traces, _ = truncated(ids, mask)
    passes = Passes(model)
    theirs = passes.topk(5, PROMPTS, ids, mask, traces=traces)
    plain, cut = (passes.forward(PROMPTS, ids, mask, others={"teacher": theirs}, traces=own) for own in (None, traces))
    torch.testing.assert_close(cut.others["teacher"].own, plain.others["teacher"].own)
    alone = passes.forward(PROMPTS, ids, mask, traces=traces).logprobs
    torch.testing.assert_close(cut.logprobs, alone)
    assert (cut.logprobs - plain.logprobs).abs().max() > 0.1


@pytest.mark.parametrize("name", SHARING)
def test_shared_prompts_give_the_gradients_of_padded_rows(name, rows):
    model = make_model(name)
    passes = [forward(model, PROMPTS, *rows, shared_prefix=layout).logprobs for layout in ("off", "on")]
    torch.testing.assert_close(passes[1], passes[0], rtol=1e-5, atol=1e-5)
    padded, shared = (gradients(model, found.square().sum()) for found in passes)
    assert_same_gradients(shared, padded)


@pytest.mark.parametrize("name", NOT_SHARING)
def test_models_that_cannot_share_say_so_once_and_are_padded(name, rows):
    model = make_model(name)
    passes = Passes(model)
    with pytest.warns(UserWarning, match="prompt is computed for every completion"):
        passes.forward(PROMPTS, *rows)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        passes.forward(PROMPTS, *rows)
    with pytest.raises(UserError, match="shared_prefix is on, but"):
        forward(model, PROMPTS, *rows, shared_prefix="on")


def test_prompts_are_shared_beyond_a_sliding_window(rows):
    config = transformers.Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=6)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    passes, (ids, mask) = Passes(model, shared_prefix="on"), rows
    torch.testing.assert_close(
        passes.forward(PROMPTS, ids, mask).logprobs, one_by_one(model, ids, mask, 1.0)[0], rtol=1e-5, atol=1e-5
    )


def test_what_serves_rows_of_16_tokens_need_not_serve_longer_ones_and_is_tried_again(rows):
    config = transformers.Qwen2MoeConfig(
        **SIZES, sliding_window=16, use_sliding_window=True, max_window_layers=1, num_experts=2, num_experts_per_tok=1
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    passes, (ids, mask) = Passes(model), rows
    passes.prepare(15)
    assert passes.tokens(PROMPTS, LENGTHS) == 12 + sum(max(0, length - 1) for length in LENGTHS)
    with pytest.warns(UserWarning, match="Qwen2MoeForCausalLM gives other results in the shared layout for rows of 32 tokens"):
        passes.prepare(17)
    assert passes.tokens(PROMPTS, LENGTHS) == len(PROMPTS) * 13
    torch.testing.assert_close(
        passes.forward(PROMPTS, ids, mask).logprobs, one_by_one(model, ids, mask, 1.0)[0], rtol=1e-5, atol=1e-5
    )
    passes.prepare(15)
    assert passes.tokens(PROMPTS, LENGTHS) < len(PROMPTS) * 13


@pytest.mark.parametrize("shared_prefix", ["off", "on"])
def test_what_lies_in_the_padding_changes_nothing(shared_prefix, rows):
    model = make_model("llama")
    ids, mask = rows
    expected = forward(model, PROMPTS, ids, mask, outputs=LM, shared_prefix=shared_prefix)
    garbage = torch.where(mask, ids, torch.randint_like(ids, -(10**6), 10**6))
    found = forward(model, PROMPTS, garbage, mask, outputs=LM, shared_prefix=shared_prefix)
    assert torch.equal(found.logprobs, expected.logprobs)
    assert torch.equal(found.entropy, expected.entropy)
    assert not found.logprobs[~mask].any()
    assert not found.entropy[~mask].any()


@pytest.mark.parametrize("shared_prefix", ["off", "on"])
def test_rows_may_come_in_any_order(shared_prefix, rows):
    model = make_model("llama")
    ids, mask = rows
    groups = torch.tensor([0, 1, 0, 1, 0, 2, 1])
    expected = forward(model, PROMPTS, ids, mask, groups, shared_prefix=shared_prefix).logprobs
    order = torch.randperm(len(PROMPTS))
    found = forward(
        model, [PROMPTS[i] for i in order], ids[order], mask[order], groups[order], shared_prefix=shared_prefix
    ).logprobs
    torch.testing.assert_close(found, expected[order])


def test_one_groups_rows_may_have_different_prompts(rows):
    model = make_model("llama")
    one_group = torch.zeros(len(PROMPTS), dtype=torch.int64)
    found = forward(model, PROMPTS, *rows, one_group, shared_prefix="on").logprobs
    torch.testing.assert_close(found, one_by_one(model, *rows, 1.0)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shared_prefix", ["off", "on"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_gradient_checkpointing_gives_the_same_gradients_and_recomputes(name, shared_prefix, rows):
    model = make_model(name)
    expected = gradients(model, forward(model, PROMPTS, *rows, shared_prefix=shared_prefix).logprobs.sum())
    model.gradient_checkpointing_enable({"use_reentrant": False})
    layers = [
        module for module in model.modules() if isinstance(module, transformers.modeling_layers.GradientCheckpointingLayer)
    ]
    calls = []
    layers[0].register_forward_hook(lambda *_: calls.append(1))
    loss = forward(model, PROMPTS, *rows, shared_prefix=shared_prefix).logprobs.sum()
    model.eval()  # as an engine would between the two passes
    assert_same_gradients(gradients(model, loss), expected)
    attention = next(module for module in layers[0].modules() if "Attention" in type(module).__name__)
    runs = []
    passes = Passes(model, shared_prefix=shared_prefix)
    passes.prepare(32)
    attention.register_forward_hook(lambda *_: runs.append(1))
    passes.forward(PROMPTS, *rows).logprobs.sum().backward()
    assert len(runs) == 2
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("shared_prefix", ["off", "on"])
def test_any_number_of_recomputed_layers_gives_the_same_bits(shared_prefix, rows):
    found, runs = [], []
    for count in range(4):
        model = make_model("llama")
        model.gradient_checkpointing_enable({"use_reentrant": False})
        passes = Passes(model, shared_prefix=shared_prefix)
        passes.recompute(count)
        depth = len(model.model.layers)
        assert passes.recomputed == (min(count, depth), depth)
        passes.prepare(32)
        calls = []
        for layer in model.model.layers:
            layer.self_attn.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        found.append(gradients(model, passes.forward(PROMPTS, *rows).logprobs.sum()))
        runs.append(len(calls) - depth)
    assert runs == [0, 1, 2, 2]
    assert all(torch.equal(each, found[0]) for each in found)


def test_dropout_is_off_whatever_mode_the_model_was_left_in(rows):
    model = make_model("gpt2")
    expected = forward(model, PROMPTS, *rows).logprobs
    assert torch.equal(forward(model.train(), PROMPTS, *rows).logprobs, expected)
    remove_dropout(model)
    model.train()
    whole = torch.tensor([SHORT])
    assert torch.equal(model(whole).logits, model.eval()(whole).logits)
    assert model.config.resid_pdrop == 0.1


@pytest.mark.parametrize("rounded", ["products", "weights"])
def test_what_rounding_would_hide_is_found_in_32_bits(rounded):
    """A convolution that reaches over the rows' borders in a shared line changes a few of many positions."""
    model = make_model("lfm2-conv")
    passes = Passes(model, autocast=torch.bfloat16) if rounded == "products" else Passes(model.bfloat16())
    assert passes._verdict_of(128, False, exact=False).shared is passes.model, "in 16 bits the mean hides it"
    with pytest.warns(UserWarning, match="gives other results in the shared layout for rows of 128 tokens"):
        passes.prepare(128)
    assert (passes._verdict.shared, passes._verdict.padded) == (None, passes.model)


def in_tf32() -> tuple[bool, bool]:
    """Returns True for matrix products, and for convolutions, that are in TF32, by the names that torch reads in any case."""
    backends = torch.backends
    return backends.cuda.matmul.fp32_precision == "tf32", backends.cudnn.conv.fp32_precision == "tf32"


def by_old_names():
    torch.set_float32_matmul_precision("medium")


def by_new_names():
    torch.backends.cuda.matmul.fp32_precision = torch.backends.cudnn.conv.fp32_precision = "tf32"
    torch.backends.cudnn.rnn.fp32_precision = "ieee"


@pytest.mark.parametrize("choose", [by_old_names, by_new_names])
def test_trials_compare_without_tf32(rows, choose):
    """On a GPU, a tower's convolutions round to 10 bits by default, which looked like wrong pictures."""
    model, seen = make_model("llama"), []
    model.model.register_forward_hook(lambda *_: seen.append(in_tf32()))
    choose()
    try:
        forward(model, PROMPTS, *rows)
        assert (False, False) in seen
        assert seen[-1] == in_tf32() == (choose is by_new_names or torch.get_float32_matmul_precision() == "medium", True)
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = True


@pytest.mark.parametrize("rounded", ["products", "weights"])
def test_attention_for_16_bits_alone_is_tried_in_16_bits(rounded, rows):
    """As flash attention is."""

    def attend(module, *states, **options):
        if torch.is_autocast_enabled("cpu"):
            states = [*(state.bfloat16() for state in states[:3]), *states[3:]]
        if states[0].dtype == torch.float32:
            raise RuntimeError("FlashAttention only supports fp16 and bf16 data type")
        return sdpa_attention_forward(module, *states, **options)

    transformers.AttentionInterface.register("in_16_bits", attend)
    transformers.AttentionMaskInterface.register("in_16_bits", transformers.masking_utils.sdpa_mask)
    model = transformers.LlamaForCausalLM._from_config(
        transformers.LlamaConfig(**SIZES), attn_implementation="in_16_bits"
    ).eval()
    passes = Passes(model, autocast=torch.bfloat16) if rounded == "products" else Passes(model.bfloat16())
    assert bool(passes.forward(PROMPTS, *rows).logprobs.isfinite().all())
    assert passes._verdict.padded is model


def test_a_softcap_that_rounding_hides_is_that_of_the_configuration():
    for seed in range(4):
        torch.manual_seed(seed)
        config = transformers.Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=30.0, attn_logit_softcapping=None)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        with torch.no_grad():
            assert find_head(model).softcap == 30.0


def test_bfloat16_autocast_is_close_and_its_log_softmax_is_float32(rows):
    model = make_model("llama")
    exact = forward(model, PROMPTS, *rows)
    expected = gradients(model, exact.logprobs.sum())
    rough = forward(model, PROMPTS, *rows, autocast=torch.bfloat16)
    assert rough.logprobs.dtype == torch.float32
    assert not torch.equal(rough.logprobs, exact.logprobs)
    torch.testing.assert_close(rough.logprobs, exact.logprobs, atol=0.1, rtol=0.05)
    assert_same_gradients(gradients(model, rough.logprobs.sum()), expected, 0.1)
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())


def test_only_completion_positions_reach_the_head_and_never_all_at_once(rows, monkeypatch):
    chunk = 2
    monkeypatch.setitem(logprobs_module.CHUNK_ELEMENTS, "cpu", chunk * VOCABULARY)
    model = make_model("llama")
    shapes = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            shapes.extend(
                tuple(item.shape) for item in (result if isinstance(result, tuple) else [result]) if isinstance(item, Tensor)
            )
            return result

    passes = Passes(model)
    passes.prepare(32)
    with Record():
        passes.forward(PROMPTS, *rows, outputs=LM).logprobs.sum().backward()
    over_vocabulary = [shape for shape in shapes if shape and shape[-1] == VOCABULARY and len(shape) > 1 and shape[0] != 32]
    assert {shape[0] for shape in over_vocabulary} == {1, chunk}
    assert sum(LENGTHS) % chunk == 1


def test_logits_are_the_models_own(rows):
    model = make_model("gemma2")
    ids, mask = rows
    logits = forward(model, PROMPTS, ids, mask, temperature=0.5, outputs=frozenset({"logits"})).logits
    assert logits.shape == (*ids.shape, VOCABULARY)
    whole = model(torch.tensor([SHORT + ids[0].tolist()])).logits[0, len(SHORT) - 1 : -1]
    torch.testing.assert_close(logits[0], whole, rtol=1e-5, atol=1e-5)
    assert not logits[~mask].any()


class OwnHead(transformers.LlamaForCausalLM):
    """A head that is no matrix product."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits.sin()
        return out


@pytest.mark.parametrize("shared_prefix", ["off", "auto"])
def test_an_unknown_head_is_noticed_and_gives_its_own_logits(shared_prefix, rows):
    torch.manual_seed(0)
    model = OwnHead(ALL["llama"]).eval()
    logprobs, entropy = one_by_one(model, *rows, 0.7)
    with pytest.warns(UserWarning, match="OwnHead is more than a matrix product"):
        found = forward(model, PROMPTS, *rows, temperature=0.7, outputs=LM, shared_prefix=shared_prefix)
    torch.testing.assert_close(found.logprobs, logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.entropy, entropy, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shared_prefix", ["off", "on"])
def test_scalar_models_give_values_before_each_token_at_it_and_after_the_last(shared_prefix, rows):
    model = make_scalar_model()
    ids, mask = rows
    asked = LM | {"values", "bootstrap", "token_scores"}
    found = forward(model, PROMPTS, ids, mask, outputs=asked, shared_prefix=shared_prefix)
    assert found.logprobs is None
    assert found.entropy is None
    for row, prompt in enumerate(PROMPTS):
        whole = [*prompt, *ids[row, mask[row]].tolist()]
        every = model.score(model.model(torch.tensor([whole])).last_hidden_state)[0, :, 0]
        torch.testing.assert_close(found.values[row, mask[row]], every[len(prompt) - 1 : -1])
        torch.testing.assert_close(found.token_scores[row, mask[row]], every[len(prompt) :])
        torch.testing.assert_close(found.bootstrap[row], every[-1])
    assert not found.values[~mask].any()
    assert not found.token_scores[~mask].any()
    alone = forward(model, PROMPTS, ids, mask, outputs=frozenset({"values"}), shared_prefix=shared_prefix)
    torch.testing.assert_close(alone.values, found.values)


@pytest.mark.parametrize("shared_prefix", ["off", "on"])
@pytest.mark.parametrize("pad", [None, 0, 9], ids=["no pad", "pad", "pad that ends"])
def test_scores_are_read_where_transformers_reads_them(pad, shared_prefix, rows):
    """Of rows that end in padding tokens, have them inside, or are nothing else; where they share a batch there, too."""
    model, (ids, mask) = make_scalar_model(pad), rows
    model.score.weight.data.normal_()
    end = 9 if pad is None else pad
    prompts = [*PROMPTS[:5], [end], [end, 3, end]]
    for row, ends in enumerate([1, 2, 0, 0, 0, 4, 6]):
        ids[row, LENGTHS[row] - ends : LENGTHS[row]] = end

    whole = [torch.tensor([*prompt, *row[own].tolist()]) for prompt, row, own in zip(prompts, ids, mask, strict=True)]
    scores = torch.stack([model(row[None]).logits[0, 0] for row in whole])
    if pad is not None:
        batch = torch.nn.utils.rnn.pad_sequence(whole, batch_first=True, padding_value=pad)
        torch.testing.assert_close(model(batch).logits[:, 0], scores)
    found = forward(model, prompts, ids, mask, outputs=frozenset({"scores"}), shared_prefix=shared_prefix).scores
    torch.testing.assert_close(found, scores, rtol=1e-5, atol=1e-5)
    pull = torch.randn(len(scores))
    assert_same_gradients(gradients(model, (pull * found).sum()), gradients(model, (pull * scores).sum()))


def test_outputs_that_were_not_asked_for_are_not_made(rows):
    found = forward(make_model("llama"), PROMPTS, *rows)
    assert found.logprobs is not None
    assert found.entropy is None
    assert found.logits is None
    assert found.values is None


def test_rows_without_a_completion_and_no_rows_at_all():
    model = make_model("llama")
    nothing = forward(model, [SHORT, LONG], torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.bool))
    assert torch.equal(nothing.logprobs, torch.zeros(2, 3))
    nothing.logprobs.sum().backward()
    empty = forward(model, [], torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, 3, dtype=torch.bool))
    assert empty.logprobs.shape == (0, 3)


def test_impossible_requests_are_refused(rows):
    model = make_model("llama")
    with pytest.raises(UserError, match="prompt of row 1 has no tokens"):
        forward(model, [SHORT, []], rows[0][:2], rows[1][:2])
    with pytest.raises(UserError, match="temperature 0"):
        forward(model, PROMPTS, *rows, temperature=0.0)


def test_prompts_are_shared_where_that_saves_something():
    passes, eight = Passes(make_model("llama")), [LONG] * 8
    passes.prepare(70)
    assert passes.tokens(eight, [4] * 8) == 8 + 24
    assert Passes(passes.model, shared_prefix="off").tokens(eight, [4] * 8) == 8 * 11
    assert passes.tokens(eight, [4] * 8, [0] * 4 + [1] * 4) == 16 + 24
    assert passes.tokens([[7] * 4 + [i] for i in range(8)], [4] * 8) == 8 * 8  # nothing in common
    assert passes.tokens([SHORT, LONG], [1, 60]) == 70  # nothing in common, but half of it would be padding
    assert passes.tokens([], []) == 0


@pytest.mark.parametrize("shared_prefix", ["on", "off"])
@pytest.mark.parametrize(
    ("scalar", "outputs", "last"),
    [
        (False, "logprobs", False),
        (True, "values", False),
        (True, "scores", True),
        (True, "bootstrap", True),
        (True, "token_scores", True),
    ],
)
def test_a_last_token_is_computed_only_where_it_is_read(rows, shared_prefix, scalar, outputs, last):
    model = make_scalar_model() if scalar else make_model("llama")
    ids, mask = rows
    seen = []
    passes = Passes(model, shared_prefix=shared_prefix)
    passes.prepare(32)
    hook = model.get_input_embeddings().register_forward_hook(lambda module, args, out: seen.append(args[0].shape))
    passes.forward(PROMPTS, ids, mask, outputs=frozenset({outputs}))
    hook.remove()
    held = [length if last else max(0, length - 1) for length in LENGTHS]
    expected = {
        "on": (1, sum(map(len, {*map(tuple, PROMPTS)})) + sum(held)),
        "off": (len(PROMPTS), max(len(prompt) + length for prompt, length in zip(PROMPTS, held, strict=True))),
    }
    assert seen == [expected[shared_prefix]]


# --- beside another model ---------------------------------------------------------------------------


def every_logprob(model, ids: Tensor, mask: Tensor, temperature: float) -> Tensor:
    """``[B, T, V]`` of each row alone, by transformers; 0 at padding."""
    rows = []
    for row, prompt in enumerate(PROMPTS):
        own = ids[row, mask[row]].tolist()
        logits = model(torch.tensor([[*prompt, *own]]), use_cache=False).logits[0, len(prompt) - 1 :][: len(own)]
        logprobs = torch.log_softmax(logits.float() / temperature, -1)
        rows.append(torch.nn.functional.pad(logprobs, (0, 0, 0, ids.shape[1] - len(own))))
    return torch.stack(rows)


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("shared_prefix", ["off", "on"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "granite", "phi-bias"])
def test_another_role_s_likeliest_tokens_have_the_values_and_gradients_of_the_full_logits(
    name, shared_prefix, chunk, rows, monkeypatch
):
    monkeypatch.setitem(logprobs_module.CHUNK_ELEMENTS, "cpu", chunk * VOCABULARY)
    teacher, student = make_model("llama-tied"), make_model(name)
    ids, mask = rows
    top = Passes(teacher, shared_prefix=shared_prefix).topk(5, PROMPTS, ids, mask, temperature=0.7)
    with torch.no_grad():
        expected = every_logprob(teacher, ids, mask, 0.7).topk(5)
    there = mask.unsqueeze(-1)
    torch.testing.assert_close(top.logprobs, expected.values * there, rtol=1e-5, atol=1e-5)
    assert top.ids[mask].equal(expected.indices[mask])
    assert not top.ids[~mask].any()

    outputs = {"temperature": 0.7, "outputs": LM, "others": {"teacher": top}, "shared_prefix": shared_prefix}
    found = forward(student, PROMPTS, ids, mask, **outputs)
    whole = every_logprob(student, ids, mask, 0.7)
    own = torch.where(there, whole.gather(-1, top.ids), 0.0)
    theirs = found.others["teacher"]
    torch.testing.assert_close(theirs.own, own, rtol=1e-5, atol=1e-5)
    assert (theirs.logprobs.equal(top.logprobs), theirs.ids.equal(top.ids)) == (True, True)
    torch.testing.assert_close(found.logprobs, whole.gather(-1, ids[..., None]).squeeze(-1) * mask, rtol=1e-5, atol=1e-5)
    pull = torch.randn(own.shape) * there
    expected = gradients(student, (pull * own).sum())
    assert_same_gradients(gradients(student, (pull * theirs.own).sum()), expected, 2e-5)


def test_more_tokens_than_there_are_and_tokens_that_there_are_not_are_refused(rows):
    ids, mask = rows
    with pytest.raises(UserError, match=rf"the 99 likeliest tokens are wanted of a model that has {VOCABULARY}: ask for fewer"):
        Passes(make_model("llama")).topk(99, PROMPTS, ids, mask)
    top = TopK(torch.zeros(*ids.shape, 1), torch.full((*ids.shape, 1), VOCABULARY))
    with pytest.raises(UserError, match=rf"the role 'teacher' has tokens beyond this model's {VOCABULARY}"):
        forward(make_model("llama"), PROMPTS, ids, mask, others={"teacher": top})
