"""Attention over the rows of a shared-prefix line: what sdpa attention gives for the gathered rows, and its gradients."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from rlhf_authoring import model_inputs
from rlhf_kernels_cpu.rows import LatestBlocks, RowAttention, make_blocks
from torch import Tensor

from rlhf_host.protocols import SharedRows

RAGGED = ([3, 1, 4], [2, 0, 5, 1, 3], [0, 1, 0, 2, 0])
"""Lengths of prompts, lengths of completions, and each completion's prompt."""


def rows_of(prompts: list[int], lengths: list[int], owners: list[int]) -> SharedRows:
    inputs, _ = model_inputs(
        [[owner + 1] * prompts[owner] for owner in owners], [[1] * length for length in lengths], shared=True
    )
    return inputs["shared_rows"]


def line_of(tokens: int, heads: int, key_heads: int, width: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Queries, keys and values as projections leave them: ``[N, heads, D]``."""
    return [torch.randn(tokens, count, width, dtype=dtype).requires_grad_() for count in (heads, key_heads, key_heads)]


def by_sdpa(line: list[Tensor], rows: SharedRows, scale: float) -> Tensor:
    query, key, value = (one[rows.gather].view(rows.count, rows.length, *one.shape[1:]).transpose(1, 2) for one in line)
    grouped = query.shape[1] > key.shape[1]
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2).flatten(0, 1)[rows.back]


def layouts(count: int) -> list[tuple[list[int], list[int], list[int]]]:
    """Random ones: equal and unequal prompts, any number of rows for each, in any order, some without a completion."""
    rng = random.Random(0)
    found = []
    for number in range(count):
        prompts = [rng.randrange(1, 20) for _ in range(rng.randrange(1, 5))]
        prompts = prompts[:1] * len(prompts) if number % 3 == 0 else prompts
        owners = list(range(len(prompts))) + [rng.randrange(len(prompts)) for _ in range(rng.randrange(8))]
        longest = rng.choice([1, 4, 20])
        found.append((prompts, [rng.randrange(longest) for _ in owners], sorted(owners) if number % 2 else owners))
    return found


@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (4, 2), (3, 1)])
def test_rows_get_what_sdpa_attention_gives_them(heads, key_heads):
    torch.manual_seed(0)
    for shape in layouts(30):
        rows = rows_of(*shape)
        line = line_of(len(rows.back), heads, key_heads, 16)
        pull = torch.randn(len(rows.back), heads, 16)
        ours = RowAttention.apply(*line, LatestBlocks().of(rows, key_heads), 0.3)
        theirs = by_sdpa(line, rows, 0.3)
        found = [[out, *torch.autograd.grad(out, line, pull)] for out in (ours, theirs)]
        for one, other in zip(*found, strict=True):
            assert (one - other).norm() <= 1e-5 * max(other.norm(), 1.0), shape


def test_gradients_are_those_of_finite_differences() -> None:
    torch.manual_seed(0)
    line = line_of(sum(RAGGED[0]) + sum(RAGGED[1]), 4, 2, 3, torch.float64)
    blocks = make_blocks(*RAGGED, 2, torch.float64)
    assert torch.autograd.gradcheck(lambda *line: RowAttention.apply(*line, blocks, 0.5), line)


def test_passes_without_gradients_give_the_same_bits():
    rows = rows_of(*RAGGED)
    line, blocks = line_of(len(rows.back), 4, 2, 16), LatestBlocks().of(rows, 2)
    trained = RowAttention.apply(*line, blocks, 0.3)
    with torch.no_grad():
        assert torch.equal(RowAttention.apply(*line, blocks, 0.3), trained)


def test_blocks_are_made_once_for_a_line_and_number_of_heads():
    latest, first, second = LatestBlocks(), rows_of(*RAGGED), rows_of(*RAGGED)
    blocks = latest.of(first, 2)
    assert latest.of(first, 2) is blocks
    assert latest.of(first, 4).heads == 4
    assert latest.of(first, 2) is blocks
    assert latest.of(second, 2) is not blocks
    assert torch.equal(latest.of(second, 2).queries, blocks.queries)


def test_what_one_group_computes_never_reaches_another():
    rows = rows_of(*RAGGED)
    line = [part.detach() for part in line_of(len(rows.back), 4, 2, 16)]
    for part in line:
        part[: RAGGED[0][0]] = float("nan")
    out = RowAttention.apply(*line, LatestBlocks().of(rows, 2), 0.3)
    others = torch.tensor([3, 4, 5, 6, 7, 15])  # the other prompts, and the fourth row's completion
    assert out[others].isfinite().all()
    assert out.isnan().any(-1).any(-1).sum() == len(rows.back) - len(others)


def test_tokens_that_nothing_looks_at_get_no_gradient():
    rows = rows_of(*RAGGED)
    line = line_of(len(rows.back), 4, 2, 16)
    RowAttention.apply(*line, LatestBlocks().of(rows, 2), 0.3)[:3].sum().backward()  # the first prompt's own places
    for part in line:
        assert part.grad[:3].any()
        assert not part.grad[3:].any()
