"""Ragged tensors: every operation has the result that it has with the padded tensor."""

import copy
import pickle
import re

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_flatten

from rlhf_host.functional import discounted_sum, gae, kl_estimate, suffix_sum, turn_advantages, whiten
from rlhf_host.records import ragged_operations
from rlhf_host.records.ragged import RaggedTensor, Rows, padded

LENGTHS = [3, 0, 6, 1, 6]
ROW = torch.tensor([0.5, -1.0, 2.0, 0.0, -3.0])

OPERATIONS = {
    "where": lambda x, m, i: torch.where(m, x, 0.0),
    "a value per row": lambda x, m, i: (x + ROW.unsqueeze(-1)) * m,
    "padding is not 0": lambda x, m, i: (x.exp() + i, (x - 1).sum(), (x - 1).sum(-1), (~m).sum(), (i - 2).max()),
    "extremes": lambda x, m, i: (torch.where(m, x, torch.inf).amin(-1), x.amax(-1, keepdim=True), x.max(), i.min()),
    "counts": lambda x, m, i: (m.sum(-1), m.any(-1), m.all(-1), m.sum(), m.any(), (m | ~m).all(), i.sum(-1)),
    "any extreme with its place": lambda x, m, i: (*x.max(-1), x.argmax(-1)),
    "chosen tokens": lambda x, m, i: (x[m], x.masked_select(m), i[m].double()),
    "chosen by padding too": lambda x, m, i: x[~m],
    "chosen rows": lambda x, m, i: (x[[4, 0]], x[ROW > 0], x.index_select(0, torch.tensor([2, 2])), x[torch.tensor([-1])]),
    "filled": lambda x, m, i: (x.masked_fill(m, 7.0), x.masked_scatter(m, torch.arange(30.0)), torch.ones_like(x)),
    "types": lambda x, m, i: (x.double(), x.to(torch.bfloat16), m.long(), m.float() / i.clamp(min=1)),
    "with a dense one": lambda x, m, i: (x * torch.arange(6.0), torch.arange(30).view(5, 6) + i),
    "with one row": lambda x, m, i: (x + torch.arange(6.0), x.cumsum(-1), torch.cat([x, x]), x.mean(), x.std()),
    "parts": lambda x, m, i: (x[1], x[2, 3], x[:, :2], x.unsqueeze(-1), x.flatten(), x.T, list(x)),
    "values": lambda x, m, i: (torch.tensor(x.tolist()), torch.from_numpy(x.numpy()), torch.from_numpy(np.asarray(i))),
    "bytes": lambda x, m, i: ((i - 1).to(torch.uint8).any(-1), (i - 1).to(torch.uint8).all(-1)),
    "rows chosen by bytes": lambda x, m, i: x[torch.tensor([0, 1, 1, 0, 1], dtype=torch.uint8)],
    "chosen of several numbers": lambda x, m, i: (two(x)[two(x) > 0], two(x).masked_select(two(i) > 0)),
    "into a tensor": lambda x, m, i: (torch.sum(i, 1, out=i.new_zeros(5)), torch.add(x, x, out=torch.zeros(5, 6))),
    "finite": lambda x, m, i: (torch.isfinite(x / i).all(), torch.isclose(x, x).all(), m.nonzero()),
}


def two(x):
    """Returns ``[B, T, 2]`` of ``[B, T]``, ragged if that is."""
    if not isinstance(x, RaggedTensor):
        return torch.stack([x, x], -1)
    return RaggedTensor(torch.stack([x.tokens, x.tokens], -1), x.rows, x.fill.unsqueeze(-1))


def tensors(seed=0):
    """A float, a mask and whole numbers stored in 32 bits; only some tokens are in the mask."""
    rows, random = Rows(np.array(LENGTHS), 6), torch.Generator().manual_seed(seed)
    count = rows.count
    return (
        RaggedTensor(torch.randn(count, generator=random), rows),
        RaggedTensor(torch.rand(count, generator=random) > 0.4, rows),
        RaggedTensor(torch.randint(0, 5, (count,), generator=random, dtype=torch.int32), rows, -1, torch.int64),
    )


def same(one, two):
    for ours, theirs in zip(tree_flatten(one)[0], tree_flatten(two)[0], strict=True):
        ours = padded(ours)
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_an_operation_has_the_padded_tensor_s_result(operation):
    ragged = tensors()
    plain = [one.padded() for one in tensors()]
    same(operation(*ragged), operation(*plain))
    same(ragged, plain)


def test_single_elements_reductions_and_masks_stay_without_padding():
    x, m, i = tensors()
    for result in (torch.where(m, x * 2 + ROW[:, None], torch.inf), ~m & (x > 0), i - 1, x[[0, 2]], kl_estimate(x, x, m, "k3")):
        assert isinstance(result, RaggedTensor)
        assert result.whole is None
    assert x.whole is m.whole is i.whole is None


WRITES = {
    "an element": lambda x, m: x.__setitem__((0, 1), 9.0),
    "chosen": lambda x, m: x.__setitem__(m, 9.0),
    "all": lambda x, m: x.sub_(1.0),
    "a row, by a part": lambda x, m: x[2].fill_(4.0),
    "padding": lambda x, m: x[0].fill_(4.0),
    "by numpy": lambda x, m: x.numpy().fill(3.0),
    "by an array": lambda x, m: np.asarray(x).fill(3.0),
    "by dlpack": lambda x, m: torch.from_dlpack(x).fill_(3.0),
    "by a copy of the object": lambda x, m: copy.copy(x).fill_(3.0),
    "by its data": lambda x, m: x.data.fill_(3.0),
    "by Python": lambda x, m: x.apply_(lambda value: value + 1),
    "with another": lambda x, m: x.map_(x * 2, lambda value, other: value + other),
    "in shared memory": lambda x, m: x.share_memory_().fill_(3.0),
    "after reading": lambda x, m: (x.sum(), x[3].zero_()),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_what_is_written_is_seen_wherever_the_tensor_is(write):
    x, m, _ = tensors()
    plain, mask = x.padded(), m.padded()
    other, kept = x.detach(), x.detach().clone()
    write(x, m)
    write(plain, mask)
    same((x, other, x.sum(-1), x[m]), (plain, plain, plain.sum(-1), plain[mask]))
    same(kept, tensors()[0].padded())
    same(x.select_rows([2, 0], 6), plain[[2, 0]])


def test_copies_and_pickles_hold_no_padding():
    rows = Rows(np.array([2, 1, 100_000]), 100_000)
    mask = rows.mask()
    there = pickle.loads(pickle.dumps(mask))
    same((there, copy.deepcopy(mask)), (mask.padded(), mask.padded()))
    assert len(pickle.dumps(mask)) < 2_000, "a mask of all tokens is its lengths"
    assert len(pickle.dumps(rows.zeros())) < 500_000
    x = tensors()[0]
    x[0, 0] = 5.0
    same(pickle.loads(pickle.dumps(x)), x.settle())


def test_rows_are_selected_and_cut():
    x, _, i = tensors()
    same((x.select_rows([3, 0], 3), i.select_rows([], 0)), (x.padded()[[3, 0], :3], i.padded()[[], :0]))
    assert [part.tolist() for part in x.rows.each(i)] == [row[:n] for row, n in zip(i.tolist(), LENGTHS, strict=True)]


BY_ROWS = {
    "gae": lambda x, m, i: gae(x, x * 2, m, 0.9, 0.8, ROW),
    "gae without discount": lambda x, m, i: gae(x, x * 2, m),
    "discounted_sum": lambda x, m, i: discounted_sum(x.double(), m, 0.7),
    "suffix_sum": lambda x, m, i: suffix_sum(x, m),
    "turn_advantages": lambda x, m, i: turn_advantages(x, i, m & (i >= 0), torch.tensor([0, 0, 1, 1, 1])),
}


@pytest.mark.parametrize("function", BY_ROWS.values(), ids=BY_ROWS)
@pytest.mark.parametrize("piece", [1, 7, 2**21])
def test_functions_of_rows_give_the_same_bits_in_pieces(function, piece, monkeypatch):
    monkeypatch.setattr(ragged_operations, "PIECE", piece)
    ragged = tensors(3)
    result, plain = function(*ragged), function(*(one.padded() for one in ragged))
    assert isinstance(result, RaggedTensor)
    assert torch.equal(padded(result), plain)


def test_sums_of_rows_have_the_padded_tensor_s_bits(monkeypatch):
    monkeypatch.setattr(ragged_operations, "PIECE", 3_000)
    lengths = np.random.default_rng(0).integers(0, 1_000, 50)
    rows = Rows(lengths, 1_000)
    x = RaggedTensor(torch.randn(rows.count), rows)
    assert torch.equal(x.sum(-1), x.padded().sum(-1))
    torch.testing.assert_close(whiten(x, rows.mask()), whiten(x.padded(), rows.mask().padded()), rtol=0, atol=1e-6)


def test_errors_are_torch_s():
    x, *_ = tensors()
    with pytest.raises(RuntimeError, match="must match the size"):
        x + torch.zeros(4, 6)
    with pytest.raises(IndexError, match=re.escape("out of bounds")):
        x[torch.tensor([9])]
    for choose in (
        lambda: x[torch.tensor([True, False])],
        lambda: x[torch.tensor([False] * 9)],
        lambda: x[torch.tensor([0], dtype=torch.int16)],
        lambda: x.index_select(0, torch.tensor([-1])),
    ):
        with pytest.raises(IndexError):
            choose()


SHAPES = {
    "transposed": lambda x: x.t_(),
    "one more": lambda x: x.unsqueeze_(0),
    "resized": lambda x: x.resize_(1, 1),
    "set": lambda x: x.set_(torch.ones(2)),
    "data": lambda x: setattr(x, "data", torch.ones(5, 6)),
}


@pytest.mark.parametrize("change", SHAPES.values(), ids=SHAPES)
def test_a_change_that_a_ragged_tensor_cannot_show_is_refused(change):
    with pytest.raises(TypeError, match="a batch's tensor"):
        change(tensors()[0])


def test_rows_in_another_order_are_not_taken_for_the_batch_s():
    x = tensors()[0]
    order = torch.tensor([2, 0, 1, 4, 3])
    other, plain, rows = x[order], x.padded()[order], x.rows
    assert isinstance(other, RaggedTensor)
    assert rows.tokens(other).tolist() == rows.tokens(plain).tolist()
    assert [part.tolist() for part in rows.each(other)] == [part.tolist() for part in rows.each(plain)]
    same((rows.ragged(other), other.padded([0, 1], 2)), (rows.ragged(plain), plain[:2, :2]))
    same(other.select_rows([0, 1], 2), plain[:2, :2])
