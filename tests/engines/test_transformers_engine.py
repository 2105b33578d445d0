"""The embedded engine: what it samples and records, where rows end, and what it costs. Plainly: no kernels take part."""

import asyncio

import pytest
import torch

from rlhf_host.engines import sampling
from rlhf_host.engines.requests import Request
from rlhf_host.errors import RunError, UserError
from rlhf_host.protocols import Counting
from rlhf_host.records.episodes import Sampling
from rlhf_host.records.token_sets import unpack_tokens

from .embedded_rig import PROMPTS, decoder_of, engine_for, mismatch, requests_for, sample

PLAIN = ["llama", "qwen2", "qwen3", "mistral_window", "gemma2", "gemma3", "gpt2", "phi3", "mixtral", "opt", "gpt_oss"]
GENERIC = ["bloom", "mamba"]


@pytest.mark.parametrize("name", PLAIN + GENERIC)
def test_logprobs_are_those_of_the_trainer(build, name):
    """Ragged prompts, shared and single, past sliding windows, rows that finish at different times."""
    model = build(name)
    engine = engine_for(model)
    requests = requests_for(lambda i, j: Sampling(3 + 7 * j + i, temperature=(1.0, 0.7, 1.3)[j % 3]))
    requests.append(Request((9, 9, 4), Sampling(30), (1,)))
    generations = sample(engine, requests)
    assert decoder_of(engine) == ("PlainDecoder" if name in PLAIN else "GenericDecoder")
    # A recurrence step by step and the parallel scan of a whole row agree less well than attention does.
    assert mismatch(model, requests, generations) <= (1e-3 if name == "mamba" else 1e-5)
    assert {generation.finish_reason for generation in generations} == {"stop", "length"}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_softcapping_follows_the_trainers_attention(build, attention):
    model = build("gemma2")
    model.set_attn_implementation(attention)
    engine = engine_for(model)
    requests = requests_for(lambda i, j: Sampling(20))
    assert mismatch(model, requests, sample(engine, requests)) <= 1e-5
    assert decoder_of(engine) == "PlainDecoder"


@pytest.mark.parametrize("name", ["llama", "mistral_window", "bloom"])
def test_a_sample_does_not_depend_on_the_batch(build, name):
    engine = engine_for(build(name))
    requests = requests_for(lambda i, j: Sampling(5 + 9 * j))
    together = sample(engine, requests)
    order = [7, 3, 19, 0, 12, 5]
    shuffled = sample(engine, [requests[i] for i in order])
    for i, generation in zip(order, shuffled, strict=True):
        (alone,) = sample(engine, [requests[i]])
        assert alone.token_ids == generation.token_ids == together[i].token_ids
        assert alone.logprobs == pytest.approx(together[i].logprobs, abs=1e-5)
        assert alone.finish_reason == together[i].finish_reason


def test_samples_differ_by_key(llama):
    generations = sample(engine_for(llama), [Request((3, 5), Sampling(12), (i,)) for i in range(16)])
    assert len({tuple(generation.token_ids) for generation in generations}) == 16


def test_small_batches_give_the_same_as_one_large(llama):
    requests = requests_for(lambda i, j: Sampling(4 + 5 * j))
    whole = sample(engine_for(llama), requests)
    for options in ({"max_batch_size": 3}, {"max_batch_tokens": 40}, {"max_batch_tokens": 1}):
        parts = sample(engine_for(llama, **options), requests)
        assert [part.token_ids for part in parts] == [one.token_ids for one in whole]


def test_batches_respect_rows_and_cache_tokens(llama):
    engine = engine_for(llama, max_batch_size=3, max_batch_tokens=25)
    requests = [Request((3,) * 10, Sampling(5), (0, i)) for i in range(4)] + [
        Request((4,) * 10, Sampling(5), (1, i)) for i in range(2)
    ]
    # 10 + 5 + 5 + 5 tokens fill the first batch; the shared prompt counts once.
    assert list(engine._batches(requests, True)) == [[0, 1, 2], [3], [4, 5]]


def test_more_than_a_block_of_uniforms_and_of_cache(llama):
    llama.generation_config.eos_token_id = None
    engine = engine_for(llama)
    requests = [Request((3, 5), Sampling(90 - 20 * i), (i,)) for i in range(3)]
    generations = sample(engine, requests)
    assert [len(generation.token_ids) for generation in generations] == [90, 70, 50]
    assert mismatch(llama, requests, generations) <= 1e-5


def test_truncated_sampling_records_the_renormalised_distribution(llama):
    engine = engine_for(llama)
    requests = requests_for(lambda i, j: Sampling(6, top_k=(0, 3)[j % 2], top_p=(0.8, 1.0)[j % 2], temperature=1.2), count=2)
    for request, generation in zip(requests, sample(engine, requests), strict=True):
        ids = torch.tensor([[*request.token_ids, *generation.token_ids]])
        logits = llama(ids, use_cache=False).logits[0, len(request.token_ids) - 1 : -1] / 1.2
        for token, logprob, row in zip(generation.token_ids, generation.logprobs, logits.detach(), strict=True):
            ordered = row.softmax(-1).sort(descending=True).values
            if request.sampling.top_k:
                kept = ordered[:3]
            else:
                kept = ordered[: int((ordered.cumsum(-1) < 0.8).sum()) + 1]
            probability = row.softmax(-1)[token]
            assert probability >= kept[-1] - 1e-7
            assert logprob == pytest.approx(float((probability / kept.sum()).log()), abs=1e-5)


@pytest.mark.parametrize("options", [{}, {"max_batch_size": 3}, {"max_batch_tokens": 40}], ids=str)
def test_truncated_sampling_tells_the_tokens_that_could_be_drawn(llama, options):
    """Of each token, in rows that end at different times, leave and come in; exact against what the rows alone say."""
    settings = ({"top_p": 0.8}, {"top_k": 3}, {"min_p": 0.2}, {"top_k": 5, "top_p": 0.6, "min_p": 0.1})
    requests = requests_for(lambda i, j: Sampling(4 + 5 * j, temperature=1.2, support=True, **settings[(i + j) % 4]))
    requests += [Request((9, 9, 4), Sampling(12, top_p=0.8), (1,)), Request((9, 9, 4), Sampling(12), (2,))]
    generations = sample(engine_for(llama, **options), requests)
    for request, generation in zip(requests, generations, strict=True):
        prompt, count, sampling = len(request.token_ids), len(generation.token_ids), request.sampling
        if not sampling.support:
            assert generation.traces == {}
            continue
        sets = generation.traces["support"]
        assert len(sets) == prompt + count - 1
        assert not any(sets[: prompt - 1])
        ids = torch.tensor([[*request.token_ids, *generation.token_ids]])
        logits = llama(ids, use_cache=False).logits[0, prompt - 1 : -1].detach().double() / 1.2
        for token, logprob, row, one in zip(generation.token_ids, generation.logprobs, logits, sets[prompt - 1 :], strict=True):
            own = unpack_tokens(one)
            assert set(own.tolist()) == kept_by(sampling, row)
            assert logprob == pytest.approx(float(row[token] - row[torch.from_numpy(own)].logsumexp(0)), abs=1e-5)


def kept_by(sampling, logits):
    """The tokens that top-k, top-p of the rest, then min-p leave, one by one."""
    order = logits.argsort(descending=True).tolist()[: sampling.top_k or None]
    left = logits[order].softmax(-1)
    best = left[0]
    if sampling.top_p < 1:
        order = order[: int((left.cumsum(0) < sampling.top_p).sum()) + 1]
    return {token for token, probability in zip(order, left.tolist(), strict=False) if probability >= sampling.min_p * best}


def test_greedy_is_transformers_own_greedy(llama):
    llama.generation_config.eos_token_id = None
    requests = [Request(prompt, Sampling(10, temperature=0.0), (i,)) for i, prompt in enumerate(PROMPTS)]
    for request, generation in zip(requests, sample(engine_for(llama), requests), strict=True):
        ids = torch.tensor([request.token_ids])
        expected = llama.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=10, pad_token_id=0)
        assert generation.token_ids == expected[0, len(request.token_ids) :].tolist()
        assert generation.logprobs == [0.0] * 10


# --- ends ---------------------------------------------------------------------------------------


def test_an_end_of_sequence_token_is_kept_and_ends_the_row(llama):
    llama.generation_config.eos_token_id = [2, 11, 12]
    for generation in sample(engine_for(llama), requests_for(lambda i, j: Sampling(40))):
        ends = [place for place, token in enumerate(generation.token_ids) if token in (2, 11, 12)]
        assert ends == ([len(generation.token_ids) - 1] if generation.finish_reason == "stop" else [])
        assert generation.finish_reason == "stop" or len(generation.token_ids) == 40


def test_the_tokenizers_end_of_sequence_counts_too(llama, tokenizer):
    llama.generation_config.eos_token_id = None
    generations = sample(engine_for(llama, tokenizer), requests_for(lambda i, j: Sampling(40)))
    assert any(generation.token_ids[-1] == 2 for generation in generations)
    assert all(2 not in generation.token_ids[:-1] for generation in generations)


def test_stop_tokens_are_each_requests_own(llama):
    llama.generation_config.eos_token_id = None
    requests = [Request((3, 5), Sampling(40, stop_token_ids=(7, 8, 9) if i % 2 else ()), (i,)) for i in range(10)]
    generations = sample(engine_for(llama), requests)
    for i, generation in enumerate(generations):
        if i % 2 == 0:
            assert (len(generation.token_ids), generation.finish_reason) == (40, "length")
        elif generation.finish_reason == "stop":
            assert generation.token_ids[-1] in (7, 8, 9)
            assert not {7, 8, 9} & set(generation.token_ids[:-1])
    assert {7, 8, 9} & {generation.token_ids[-1] for generation in generations[1::2]}


def test_stop_strings_end_the_row_and_stay_in_it(llama, tokenizer):
    tokenizer.eos_token = None
    llama.generation_config.eos_token_id = None
    free = sample(engine_for(llama, tokenizer), [Request((3, 5), Sampling(40), (i,)) for i in range(12)])
    stops = (tokenizer.decode(free[0].token_ids[10:12]), tokenizer.decode(free[1].token_ids[3:6]), "never")
    requests = [Request((3, 5), Sampling(40, stop=stops), (i,)) for i in range(12)]
    generations = sample(engine_for(llama, tokenizer), requests)
    for whole, generation in zip(free, generations, strict=True):
        prefixes = (whole.token_ids[:end] for end in range(1, 41))
        expected = next((ids for ids in prefixes if any(stop in tokenizer.decode(ids) for stop in stops)), None)
        assert generation.token_ids == (expected or whole.token_ids)
        assert generation.finish_reason == ("stop" if expected else "length")
    assert {"stop", "length"} == {generation.finish_reason for generation in generations}


def test_the_models_positions_bound_a_row(llama):
    llama.generation_config.eos_token_id = None
    engine = engine_for(llama)
    requests = [
        Request((3,) * 90, Sampling(50), (0,)),
        Request((3,) * 95, Sampling(50), (1,)),
        Request((3,), Sampling(4), (2,)),
    ]
    generations = sample(engine, requests)
    assert [len(generation.token_ids) for generation in generations] == [6, 1, 4]
    assert {generation.finish_reason for generation in generations} == {"length"}


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request((), Sampling(4), (0,)), "empty prompt"),
        (Request((3,) * 96, Sampling(4), (0,)), "96 tokens leaves no room in the engine's 96 positions"),
        (Request((3, 99), Sampling(4), (0,)), "token 99 is not in the model's vocabulary of 31"),
        (Request((3,), Sampling(0), (0,)), "max_new_tokens should be a whole number from 1 to"),
        (
            Request((3,), Sampling(4, temperature=1e-39), (0,)),
            r"temperature should be 0 \(greedy\), or a number from 0.01 to 100",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_at_the_door(llama, request_, message):
    with pytest.raises(UserError, match=message):
        sample(engine_for(llama), [Request((3, 4), Sampling(4), (1,)), request_])


def test_a_request_that_breaks_the_model_fails_alone(llama):
    engine, requests = engine_for(llama), requests_for(lambda i, j: Sampling(9))
    bad = Request((29, 29, 29), Sampling(9), (9,))

    def spoil(module, args, out):
        return torch.where((args[0][:, :3] == 29).all(-1)[:, None, None], torch.nan, out) if args[0].shape[1] > 1 else out

    llama.model.embed_tokens.register_forward_hook(spoil)

    async def main():
        engine.expect(len(requests) + 1)
        asked = [engine.generate(one.token_ids, one.sampling, one.key) for one in [*requests, bad]]
        return await asyncio.gather(*asked, return_exceptions=True)

    *others, broken = asyncio.run(main())
    assert isinstance(broken, RunError)
    assert [one.token_ids for one in others] == [one.token_ids for one in sample(engine, requests)]


def test_a_model_that_broke_is_a_run_error(llama):
    with torch.no_grad():
        llama.model.norm.weight.fill_(float("nan"))
    engine = engine_for(llama)
    engine.set_version(7)
    with pytest.raises(RunError, match="weight version 7 stopped: the model's logits are not finite"):
        sample(engine, [Request((3, 4), Sampling(4), (0,))])


# --- what it costs ------------------------------------------------------------------------------


def test_a_shared_prompt_is_computed_once_and_finished_rows_leave(llama):
    llama.generation_config.eos_token_id = None
    engine = engine_for(llama)
    prompts = [(3,) * 10, (4,) * 10]
    requests = [Request(prompt, Sampling(2 if j < 6 else 8), (i, j)) for i, prompt in enumerate(prompts) for j in range(8)]
    sample(engine, requests)
    seen = []
    hook = llama.model.embed_tokens.register_forward_hook(lambda module, args, out: seen.append(tuple(args[0].shape)))
    sample(engine, requests)
    hook.remove()
    assert seen == [(2, 10), (16, 1), *[(4, 1)] * 6]


def test_prompts_never_make_logits_of_every_position(llama):
    """Its weight is used for one position a row, outside of the head's own forward."""
    engine = engine_for(llama)
    sample(engine, requests_for(lambda i, j: Sampling(2)))
    shapes = []
    hook = llama.lm_head.register_forward_hook(lambda module, args, out: shapes.append(tuple(out.shape)))
    sample(engine, requests_for(lambda i, j: Sampling(2)))
    hook.remove()
    assert shapes == []


def test_long_prompts_are_computed_in_pieces(llama, monkeypatch):
    monkeypatch.setattr("rlhf_host.engines.decoding.PREFILL_TOKENS", 12)
    engine = engine_for(llama)
    requests = requests_for(lambda i, j: Sampling(8), prompts=[*PROMPTS, (9,) * 30])
    sample(engine, requests[-1:])
    seen = []
    hook = llama.model.embed_tokens.register_forward_hook(lambda module, args, out: seen.append(tuple(args[0].shape)))
    assert mismatch(llama, requests, sample(engine, requests)) <= 1e-5
    hook.remove()
    assert seen[:5] == [(1, 30), (1, 11), (1, 7), (3, 3), (24, 1)]


@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_weights_that_change_under_a_batch_are_used_from_the_next_token_on(build, monkeypatch, name):
    model = build(name)
    model.generation_config.eos_token_id = None
    engine = engine_for(model)
    requests = [Request((3, 5), Sampling(8), (i,)) for i in range(4)]
    before = sample(engine, requests)
    draw, steps = sampling.Sampler.draw, iter(range(1000))

    def drawing(self, logits, uniforms):
        if next(steps) == 3:
            with torch.no_grad():
                model.lm_head.weight.zero_()
            engine.set_version(1)
        return draw(self, logits, uniforms)

    monkeypatch.setattr(sampling.Sampler, "draw", drawing)
    after = sample(engine, requests)
    uniform = -float(torch.log(torch.tensor(float(model.config.vocab_size))))
    for old, new in zip(before, after, strict=True):
        assert new.versions == [0, 0, 0, 0, 1, 1, 1, 1]
        assert new.token_ids[:4] == old.token_ids[:4]
        assert new.logprobs[4:] == pytest.approx([uniform] * 4, abs=1e-5)


@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_a_batch_does_not_depend_on_what_was_decoded_before(build, name):
    """To the last bit: a resumed run repeats no evaluation that the interrupted one had made."""
    large, small = requests_for(lambda i, j: Sampling(30), count=8), requests_for(lambda i, j: Sampling(8), count=1)
    model = build(name)
    alone, second = sample(engine_for(model), small), engine_for(model)
    sample(second, large)
    assert sample(second, small) == alone


def test_a_model_that_is_cast_is_decoded_as_it_is_now(llama):
    engine = engine_for(llama)
    requests = requests_for(lambda i, j: Sampling(30), count=8)
    sample(engine, requests)
    llama.to(torch.bfloat16)
    sample(engine, requests)
    llama.to(torch.float32)
    assert mismatch(llama, requests, sample(engine, requests)) <= 1e-5


def test_autocast_samples_what_the_trainer_computes_in_bfloat16(build):
    model = build("qwen3")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 / 3 if parameter.dim() > 1 else 1.0)
    engine = engine_for(model, autocast="bfloat16")
    requests = requests_for(lambda i, j: Sampling(12))
    for _ in range(2):
        generations = sample(engine, requests)
        with torch.autocast("cpu", torch.bfloat16):
            lowered = mismatch(model, requests, generations)
        assert lowered < 0.05
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.05)
    assert decoder_of(engine) == "PlainDecoder"
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_tokens_are_counted_while_they_are_sampled(llama):
    """Also those of answers that end early, and before any is given."""
    engine, seen = engine_for(llama), []
    sampled = engine._take_in
    engine._take_in = lambda: (seen.append(engine.sampled), sampled())
    answers = sample(engine, requests_for(lambda i, j: Sampling(max_new_tokens=1 + i + j)))
    assert isinstance(engine, Counting)
    assert engine.sampled == sum(len(answer.token_ids) for answer in answers)
    assert seen == sorted(seen)
    assert seen[0] == 0 < seen[1] < engine.sampled
