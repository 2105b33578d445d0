"""Llamas decoded in few operators: the logits of the model's full pass over each row, and what is computed for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from rlhf_kernels_cpu import prefix_cache
from rlhf_kernels_cpu.decode import LlamaDecoder
from rlhf_kernels_cpu.products import has_onednn
from torch import Tensor

PROMPTS = [[3, 5, 7], [4, 9, 8, 3, 11, 20, 7], [3, 4], [5], [6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]]
FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]


@pytest.fixture
def decoder_of(kernels, use):
    def make(model: Any) -> LlamaDecoder:
        assert kernels.unsuited(model, use("sample")) is None
        return kernels.twin(model, use("sample"))

    return make


@pytest.fixture(params=["prompts copied to their rows", "prompts shared"])
def cache_layout(request, monkeypatch):
    """Both ways in which decoding keeps prompts: short ones are copied."""
    if "shared" in request.param:
        monkeypatch.setattr(prefix_cache, "COPIED", 0)


@pytest.fixture
def sizes(monkeypatch):
    """The shapes of the ids that are computed."""
    seen: list[tuple[int, ...]] = []
    hidden = LlamaDecoder._hidden
    monkeypatch.setattr(
        LlamaDecoder, "_hidden", lambda self, ids, *rest: (seen.append(tuple(ids.shape)), hidden(self, ids, *rest))[1]
    )
    return seen


@torch.inference_mode()
def decode(decoder: LlamaDecoder, prompts: Sequence[list[int]], lengths: Sequence[int]) -> list[Tensor]:
    """``[lengths[i] + 1, V]`` of rows with made-up tokens; rows leave as they end, those with equal prompts are neighbours."""
    distinct = [list(prompt) for prompt in dict.fromkeys(map(tuple, prompts))]
    owners = torch.tensor([distinct.index(prompt) for prompt in prompts])
    steps = [[logits] for logits in decoder.prefill(distinct)[owners]]
    decoder.start(owners, max(lengths))
    alive = list(range(len(prompts)))
    for place in range(max(lengths)):
        going = [row for row in alive if place < lengths[row]]
        if going != alive:
            decoder.keep(torch.tensor([alive.index(row) for row in going]))
            alive = going
        for row, logits in zip(alive, decoder.step(torch.tensor([token(row, place) for row in alive])), strict=True):
            steps[row].append(logits)
    return [torch.stack(row) for row in steps]


def token(row: int, place: int) -> int:
    return (7 * row + 5 * place + 3) % 40


@torch.no_grad()
def by_full_passes(model: Any, prompts: Sequence[list[int]], lengths: Sequence[int]) -> list[Tensor]:
    rows = [[*prompt, *(token(row, place) for place in range(lengths[row]))] for row, prompt in enumerate(prompts)]
    passes = (model(torch.tensor([row]), use_cache=False).logits[0] for row in rows)
    return [logits[len(prompt) - 1 :] for logits, prompt in zip(passes, prompts, strict=True)]


def assert_samples_from(model: Any, decoder: LlamaDecoder, prompts: Sequence[list[int]], lengths: Sequence[int]) -> None:
    for ours, own in zip(decode(decoder, prompts, lengths), by_full_passes(model, prompts, lengths), strict=True):
        torch.testing.assert_close(ours, own, rtol=0, atol=5e-6 * float(own.abs().max()))


@pytest.mark.usefixtures("cache_layout")
@pytest.mark.parametrize("kind", FAMILIES)
def test_logits_are_those_of_full_passes(kind, build, decoder_of):
    """Ragged prompts, shared and single, past sliding windows, rows that finish at different times."""
    model = build(kind)
    prompts = [*(prompt for prompt in PROMPTS for _ in range(4)), [9, 9, 4]]
    lengths = [*(3 + 7 * sample + number for number in range(len(PROMPTS)) for sample in range(4)), 30]
    assert_samples_from(model, decoder_of(model), prompts, lengths)


@pytest.mark.usefixtures("cache_layout")
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_longer_than_the_room_for_completions_and_for_copied_prompts(kind, build, decoder_of):
    model = build(kind)
    assert_samples_from(model, decoder_of(model), [[3, 5]] * 3, [140, 70, 50])
    long = [[3, 4, 5] * 30, [7] * 66]
    assert_samples_from(model, decoder_of(model), [long[0], long[0], long[1]], [9, 3, 9])


@pytest.mark.usefixtures("cache_layout")
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_a_row_does_not_depend_on_the_batch(kind, build, decoder_of):
    decoder = decoder_of(build(kind))
    prompts = [prompt for prompt in PROMPTS for _ in range(2)]
    together = decode(decoder, prompts, [12] * len(prompts))
    for prompt in PROMPTS:
        row = prompts.index(prompt)
        tokens = torch.tensor([[token(row, place)] for place in range(12)])
        with torch.inference_mode():
            alone = [decoder.prefill([prompt])[0]]
            decoder.start(torch.tensor([0]), 12)
            alone += [decoder.step(one)[0] for one in tokens]
        torch.testing.assert_close(torch.stack(alone), together[row], rtol=1e-4, atol=1e-4)


def test_a_shared_prompt_is_computed_once_and_finished_rows_leave(build, decoder_of, sizes):
    decode(decoder_of(build("llama")), [[3] * 10] * 8 + [[4] * 10] * 8, ([1] * 6 + [7] * 2) * 2)
    assert sizes == [(2, 10), (16, 1), *[(4, 1)] * 6]


def test_prompts_never_make_logits_of_every_position(build, decoder_of, monkeypatch):
    shapes, logits = [], LlamaDecoder._logits
    monkeypatch.setattr(
        LlamaDecoder, "_logits", lambda self, hidden: (shapes.append(tuple(hidden.shape)), logits(self, hidden))[1]
    )
    decode(decoder_of(build("llama")), [prompt for prompt in PROMPTS for _ in range(4)], [1] * 20)
    assert shapes == [(5, 32), (20, 32)]


def test_long_prompts_are_computed_in_pieces(build, decoder_of, monkeypatch, sizes):
    monkeypatch.setattr("rlhf_kernels_cpu.decode.PREFILL_TOKENS", 12)
    model = build("llama")
    prompts = [prompt for prompt in [*PROMPTS, [9] * 30] for _ in range(4)]
    assert_samples_from(model, decoder_of(model), prompts, [8] * 24)
    assert sizes[:5] == [(1, 30), (1, 11), (1, 7), (3, 3), (24, 1)]


@pytest.mark.parametrize(("length", "places"), [(prefix_cache.COPIED, prefix_cache.COPIED + 7), (prefix_cache.COPIED + 1, 7)])
def test_only_short_prompts_are_copied_to_their_rows(length, places, build, decoder_of):
    decoder = decoder_of(build("llama"))
    decode(decoder, [[3] * length] * 4, [7] * 4)
    assert decoder._cache.suffix[0][0].shape[2] == places
    assert bool(decoder._cache.prefix) == (places == 7)


def test_weights_that_change_under_a_batch_are_used_from_the_next_token_on(build, decoder_of):
    model = build("qwen3")
    decoder = decoder_of(model)
    with torch.inference_mode():
        decoder.prefill([[3, 5]])
        decoder.start(torch.tensor([0, 0]), 8)
        first = decoder.step(torch.tensor([4, 5]))
        model.lm_head.weight.data.zero_()
        assert not torch.equal(decoder.step(torch.tensor([4, 5])), torch.zeros_like(first)), "not before refresh"
        decoder.refresh()
        assert torch.equal(decoder.step(torch.tensor([4, 5])), torch.zeros_like(first))


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("hidden", [32, 272])
def test_new_weights_are_used_after_refresh(hidden, kind, build, decoder_of):
    """272: large enough that oneDNN's packed copies are in use."""
    model = build(kind, hidden_size=hidden, intermediate_size=2 * hidden)
    decoder = decoder_of(model)
    assert decoder._blocks[0].gate_up.packed == (hidden == 272 and has_onednn())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        assert_samples_from(model, decoder, [[3, 5, 7]] * 4, [9] * 4)
        ids = torch.randint(3, 40, (2, 12))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        decoder.refresh()


def test_nothing_that_was_decoded_before_changes_a_batch(build, decoder_of):
    """To the last bit: a resumed run repeats no evaluation that the interrupted one had made."""
    model, small = build("llama"), ([[3, 5, 7], [4, 9]], [8, 8])
    used, fresh = decoder_of(model), decoder_of(model)
    decode(used, [prompt for prompt in PROMPTS for _ in range(8)], [30] * 40)
    assert all(map(torch.equal, decode(used, *small), decode(fresh, *small)))
