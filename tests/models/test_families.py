"""Every causal language model that transformers ships is passed and sampled as plain transformers has it, or refused by name."""

from __future__ import annotations

import asyncio
import contextlib
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_host.config.schema import RoleConfig
from rlhf_host.engines.plain_path import PlainKernels
from rlhf_host.engines.requests import Request
from rlhf_host.engines.transformers import Transformers
from rlhf_host.errors import UserError
from rlhf_host.models.loading import load_model
from rlhf_host.models.passes import Passes
from rlhf_host.protocols import EngineStart, Use
from rlhf_host.records.episodes import Sampling
from rlhf_host.runtimes.compute import Inline

from .miniatures import OUTSIDE, VARIANTS, VOCABULARY, WINDOW, families, long_rope, miniature

OUTCOMES = {
    "shared shared plain": """
        gpt2 afmoe apertus arcee aria_text axk1 bert-generation biogpt bitnet cohere cohere2 cohere2_moe cohere_compass_text
        ctrl cwm dbrx deepseek_v2 deepseek_v3 diffllama dots1 emu3 ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo fuyu
        gemma gemma2 gemma3 gemma3_text gemma3n_text gemma4 gemma4_text gemma4_unified gemma4_unified_text glm glm4 glm4_moe
        glm4_moe_lite got_ocr2 gpt_bigcode gpt_neox granite granitemoe granitemoeshared helium hrm_text hunyuan_v1_dense
        hunyuan_v1_moe hy_v3 hyperclovax jais2 jetmoe laguna llama longcat_flash mellum minicpm3 minimax_m2 ministral
        ministral3 mistral mixtral mllama nanochat olmo olmo2 olmo3 olmoe opt persimmon phi phi3 phi4_multimodal qwen2 qwen3
        qwen3_moe seed_oss smollm3 solar_open starcoder2 vaultgemma whisper youtu
    """,
    "shared padded plain": "phimoe qwen2_moe",
    "padded padded plain": """
        codegen doge falcon git gpt_neox_japanese gpt_oss gptj granite_swa granitemoe_swa mimo_v2_flash nemotron stablelm xglm
        gemma2-eager
    """,
    "shared shared generic": "bert electra ernie modernbert-decoder roc_bert",
    "padded padded generic": """
        axk2 bamba bart big_bird bigbird_pegasus blenderbot blenderbot-small bloom deepseek_v32 falcon_h1 falcon_mamba
        glm_moe_dsa gpt_neo granitemoehybrid hy_v4 inkling_text jamba kimi_linear lfm2 lfm2_moe llama4 llama4_text mamba
        mamba2 marian mbart megatron-bert minimax_m3_vl_text mpt mvp nemotron_h olmo_hybrid pegasus plbart
        qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next rembert roformer trocr zamba zamba2 zaya
    """,
    "padded padded repeating": "deepseek_v4 minimax qwen4_exp qwen4_exp_text",
    "padded padded refused": """
        blt camembert data2vec-text moshi openai-gpt recurrent_gemma roberta roberta-prelayernorm rwkv xlm-roberta
        xlm-roberta-xl xlstm xmod
    """,
    "alone alone refused": "prophetnet",
    "shared alone refused": "phi3-long-rope",
    "refused refused refused": "cpmant xlm xlnet bert-bidirectional doge-moe",
}
"""Layout of rows within the windows, layout of longer ones, what decodes: families and variants."""
CASES = [name for names in OUTCOMES.values() for name in names.split()]
OUTCOME_OF = {name: outcome for outcome, names in OUTCOMES.items() for name in names.split()}

SHORT, LONG = ([5, 5, 3], [6, 4, 5]), ([14, 14, 9], [10, 6, 8])
"""Lengths of prompts, of which the first two are equal, and of completions: within the windows, and beyond."""
TEMPERATURE = 0.7


pytestmark = pytest.mark.usefixtures("quiet")


def text(length: int, seed: int) -> list[int]:
    return torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def rows_of(sizes, lengths) -> tuple[list[list[int]], Tensor, Tensor]:
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return [text(size, size) for size in sizes], torch.tensor([text(max(lengths), 90 + row) for row in range(len(sizes))]), mask


def one_by_one(model, prompts, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """``[B, T]`` log-probabilities and entropies."""
    logprobs, entropy = torch.zeros(ids.shape), torch.zeros(ids.shape)
    for row, prompt in enumerate(prompts):
        own = ids[row, mask[row]]
        logits = model(input_ids=torch.tensor([[*prompt, *own.tolist()]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        every = torch.log_softmax(logits.float() / TEMPERATURE, -1)
        logprobs[row, : len(own)] = every.gather(-1, own[:, None]).squeeze(-1)
        entropy[row, : len(own)] = -(every.exp() * every).sum(-1)
    return logprobs, entropy


def gradients(model, loss: Tensor) -> Tensor:
    loss.backward()
    gradient = torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in model.parameters()])
    model.zero_grad(set_to_none=True)
    return gradient


def state(model) -> dict[Any, Any]:
    """Everything that the model's modules hold."""
    held: dict[Any, Any] = {"config": model.config.to_dict(), "attention": model.config._attn_implementation}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            parts = value.items() if isinstance(value, dict) else [("", value)]
            held |= {(name, key, part): _comparable(thing) for part, thing in parts}
    return held


def _comparable(value: Any) -> Any:
    if isinstance(value, Tensor):
        return id(value), value.detach().clone()
    return value if isinstance(value, str | int | float | bool | tuple | None) else id(value)


def changes(before: dict[Any, Any], after: dict[Any, Any]) -> set[Any]:
    def same(one, other):
        if isinstance(one, tuple) and len(one) == 2 and isinstance(one[1], Tensor):
            return isinstance(other, tuple) and one[0] == other[0] and torch.equal(one[1], other[1])
        return one == other

    return {
        key
        for key in before.keys() | after.keys()
        if key not in before or key not in after or not same(before[key], after[key])
    }


@contextlib.contextmanager
def unchanged(model):
    """But for what a plain forward pass of the model changes."""
    states = [state(model)]
    with torch.no_grad():
        for length in (2 * WINDOW, 3):
            with contextlib.suppress(Exception):
                model(input_ids=torch.tensor([text(length, length)]))
            states.append(state(model))
    own = changes(states[0], states[1]) | changes(states[1], states[2])
    yield
    assert changes(states[2], state(model)) <= own


def refusal(model, error: UserError) -> str:
    assert type(model).__name__ in str(error)
    return "refused"


def layout_of(model, prompts, ids: Tensor, mask: Tensor) -> str:
    """In which layout a pass runs, after its values and gradients have been compared with those of each row alone."""
    wanted = frozenset({"logprobs", "entropy"})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            passes = Passes(model)
            outputs = passes.forward(prompts, ids, mask, temperature=TEMPERATURE, outputs=wanted, entropy_grad=True)
        except UserError as error:
            return refusal(model, error)
    layout = "shared" if passes._verdict.shared is not None else "alone" if passes.one_by_one else "padded"
    assert layout == "shared" or any(type(model).__name__ in str(warning.message) for warning in caught)
    logprobs, entropy = one_by_one(model, prompts, ids, mask)
    torch.testing.assert_close(outputs.logprobs, logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(outputs.entropy, entropy, rtol=1e-5, atol=1e-5)
    pull = torch.randn(2, *ids.shape, generator=torch.Generator().manual_seed(0)) * mask
    expected = gradients(model, (pull[0] * logprobs + pull[1] * entropy).sum())
    gradient = gradients(model, (pull[0] * outputs.logprobs + pull[1] * outputs.entropy).sum())
    assert (gradient - expected).norm() <= 2e-5 * expected.norm()
    return layout


def decoder_of(model) -> str:
    """What decodes, after the log-probabilities of samples have been compared with those of whole rows."""
    sizes = [(prompt, tokens) for prompt in (4, 11) for tokens in (4, 12)]
    requests = [Request(tuple(text(size, size)), Sampling(n, temperature=TEMPERATURE), (size, n)) for size, n in sizes]
    start = EngineStart(model=model, tokenizer=None, version=0, compute=Inline(), kernels=PlainKernels())
    engine = Transformers(Transformers.Options()).start(start)

    async def sample():
        engine.expect(len(requests))
        return await asyncio.gather(*(engine.generate(r.token_ids, r.sampling, r.key) for r in requests))

    try:
        generations = asyncio.run(sample())
    except UserError as error:
        return refusal(model, error)
    for request, generation in zip(requests, generations, strict=True):
        ids = torch.tensor([generation.token_ids])
        with torch.no_grad():
            logprobs, _ = one_by_one(model, [request.token_ids], ids, torch.ones_like(ids, dtype=torch.bool))
        torch.testing.assert_close(torch.tensor(generation.logprobs), logprobs[0], rtol=1e-5, atol=1e-5)
    return type(engine._fresh).__name__.removesuffix("Decoder").lower()


def outcome_of(model) -> str:
    return " ".join([*(layout_of(model, *rows_of(*lengths)) for lengths in (SHORT, LONG)), decoder_of(model)])


@pytest.mark.parametrize("name", CASES)
def test_a_family_is_passed_and_sampled_as_transformers_has_it(name):
    model = miniature(name)
    with unchanged(model):
        outcome = outcome_of(model)
    assert outcome == OUTCOME_OF[name]


def test_every_family_of_transformers_is_here():
    assert set(CASES) | OUTSIDE.keys() == families().keys() | VARIANTS.keys()
    assert len(CASES) == len(set(CASES))
    assert not OUTSIDE.keys() & set(CASES)


def test_long_rope_is_noticed_far_beyond_its_original_length():
    """Where most rows of a batch are beyond it, too."""
    model = miniature("phi3-long-rope")
    prompts, ids, mask = rows_of([60, 60, 6], [60, 20, 5])
    with pytest.warns(UserWarning, match="rows of Phi3ForCausalLM run one by one"):
        outputs = Passes(model).forward(prompts, ids, mask, temperature=TEMPERATURE)
    torch.testing.assert_close(outputs.logprobs, one_by_one(model, prompts, ids, mask)[0], rtol=1e-5, atol=1e-5)
    use = Use(purpose="sample", device=torch.device("cpu"), dtype=torch.float32, autocast=None)
    with pytest.raises(UserError, match=r"Phi3ForCausalLM cannot be sampled .* changes with the length of its row"):
        PlainKernels().decoder(model, use, 120)


@pytest.mark.parametrize("window", [3, 5, 8, 12, 15])
def test_long_rope_is_noticed_where_its_original_length_is_small(window):
    model = miniature("phi3", **long_rope(window))
    prompts, ids, mask = rows_of([20, 20, 2], [10, 6, 1])
    with pytest.warns(UserWarning, match="rows of Phi3ForCausalLM run one by one"):
        outputs = Passes(model).forward(prompts, ids, mask, temperature=TEMPERATURE)
    torch.testing.assert_close(outputs.logprobs, one_by_one(model, prompts, ids, mask)[0], rtol=1e-5, atol=1e-5)
    use = Use(purpose="sample", device=torch.device("cpu"), dtype=torch.float32, autocast=None)
    with pytest.raises(UserError, match=r"Phi3ForCausalLM cannot be sampled .* changes with the length of its row"):
        PlainKernels().decoder(model, use, 32)


@pytest.mark.parametrize(
    ("name", "attention"), [("gemma2", "eager"), ("gpt_oss", "eager"), ("mamba", "eager"), ("llama", "sdpa")]
)
def test_models_are_loaded_with_an_attention_that_leaves_nothing_out(name, attention, tmp_path):
    miniature(name).save_pretrained(tmp_path)
    model = load_model(RoleConfig(model=str(tmp_path)))
    assert model.config._attn_implementation == attention
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model(torch.tensor([text(5, 5)]))


def test_an_attention_that_leaves_something_out_is_warned_of(tmp_path):
    miniature("gemma2").save_pretrained(tmp_path)
    model = load_model(RoleConfig(model=str(tmp_path), attn_implementation="sdpa"))
    with pytest.warns(UserWarning, match="sdpa leaves out the softcap of Gemma2Attention"):
        model(torch.tensor([text(5, 5)]))
