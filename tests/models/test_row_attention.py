"""Attention over the rows of a shared-prefix line: what sdpa attention gives for the gathered rows, and its gradients."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

from rlhf_host.models import row_attention
from rlhf_host.models.layouts import Rows, _attention, shared_layout
from rlhf_host.models.row_attention import RowAttention, make_blocks, takes

RAGGED = ([3, 1, 4], [2, 0, 5, 1, 3], [0, 1, 0, 2, 0])
"""Lengths of prompts, lengths of completions, and each completion's prompt."""


class Layer(nn.Module):
    def __init__(self, groups: int) -> None:
        super().__init__()
        self.num_key_value_groups = groups


def rows_of(prompts: list[int], lengths: list[int], owners: list[int]) -> Rows:
    prompt_ids = [[1] * prompts[owner] for owner in owners]
    rows = shared_layout(prompt_ids, torch.ones(sum(lengths), dtype=torch.int64), lengths, owners).rows
    assert rows is not None
    return rows


def line_of(rows: Rows, heads: int, key_heads: int, width: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Queries, keys and values as projections leave them: ``[1, heads, N, D]``, token by token in memory."""
    return [
        torch.randn(1, len(rows.back), count, width, dtype=dtype).transpose(1, 2).requires_grad_()
        for count in (heads, key_heads, key_heads)
    ]


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
def test_rows_get_what_sdpa_attention_gives_them(heads, key_heads, monkeypatch):
    torch.manual_seed(0)
    layer = Layer(heads // key_heads)
    for shape in layouts(30):
        rows = rows_of(*shape)
        line = line_of(rows, heads, key_heads, 16)
        pull = torch.randn(1, len(rows.back), heads, 16)
        found = []
        for longest in (row_attention.LONGEST, 0):
            with monkeypatch.context() as patch:
                patch.setattr(row_attention, "LONGEST", longest)
                out, _ = _attention(layer, *line, None, rows, dropout=0.0, scaling=0.3)
            assert ("RowAttention" in type(out.grad_fn).__name__) is (longest > 0)
            found.append([out, *torch.autograd.grad(out, line, pull)])
        for ours, theirs in zip(*found, strict=True):
            assert (ours - theirs).norm() <= 1e-5 * max(theirs.norm(), 1.0), shape


def test_gradients_are_those_of_finite_differences() -> None:
    torch.manual_seed(0)
    line = line_of(rows_of(*RAGGED), 4, 2, 3, torch.float64)
    blocks = make_blocks(*RAGGED, 2, torch.float64)
    assert torch.autograd.gradcheck(lambda *line: RowAttention.apply(*line, blocks, 0.5), line)


def test_passes_without_gradients_give_the_same_bits():
    rows = rows_of(*RAGGED)
    line = line_of(rows, 4, 2, 16)
    trained, _ = _attention(Layer(2), *line, None, rows)
    with torch.no_grad():
        found, _ = _attention(Layer(2), *line, None, rows)
    assert torch.equal(found, trained)
    assert list(rows.made) == [2]


def test_what_one_group_computes_never_reaches_another():
    rows = rows_of(*RAGGED)
    query, key, value = (part.detach() for part in line_of(rows, 4, 2, 16))
    for line in (query, key, value):
        line[:, :, : RAGGED[0][0]] = float("nan")
    out, _ = _attention(Layer(2), query, key, value, None, rows)
    others = torch.tensor([3, 4, 5, 6, 7, 15])  # the other prompts, and the fourth row's completion
    assert out[0, others].isfinite().all()
    assert out[0].isnan().any(-1).any(-1).sum() == len(rows.back) - len(others)


def test_tokens_that_nothing_looks_at_get_no_gradient():
    rows = rows_of(*RAGGED)
    line = line_of(rows, 4, 2, 16)
    out, _ = _attention(Layer(2), *line, None, rows)
    out[:, :3].sum().backward()  # the first prompt's own places
    for part in line:
        assert part.grad[:, :, :3].any()
        assert not part.grad[:, :, 3:].any()


@pytest.mark.parametrize(
    "changed",
    [
        {"length": 65},
        {"dtype": torch.bfloat16},
        {"dropout": 0.1},
        {"softcap": 50.0},
        {"s_aux": torch.zeros(4)},
        {"is_causal": False},
        {"an_option_of_tomorrow": 1},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_whatever_it_does_not_compute_is_left_to_sdpa_attention(changed):
    def taken(length=64, dtype=torch.float32, **options):
        line = torch.zeros(1, 4, 8, 16, dtype=dtype)
        return takes(Layer(1), line, line, line, length, {"scaling": 0.3, "sliding_window": 128, "softcap": None} | options)

    assert taken()
    assert not taken(**changed)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not taken()
