"""Losses between two vocabularies against loops over Python's floats, and against finite differences."""

from __future__ import annotations

import math
from itertools import pairwise, zip_longest

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rlhf_authoring.tensors import make_batch
from rlhf_plugin_distill import Distill, OnPolicyDistill
from rlhf_plugin_distill.other_vocabulary import (
    Spans,
    joint,
    likeliest_loss,
    measure_divergence,
    measures,
    span_gaps,
    whole_loss,
)

from rlhf_host import Distribution, LossTerm, Metric, Outputs
from rlhf_host.records.tensors import TopK

TEACHER, STUDENT = 11, 7
SHARED = torch.tensor([[0, 3], [4, 1], [9, 6], [10, 0]])
ROWS, ENDS, OTHER_ENDS = 2, ([1, 3, 4, 6], [2, 3]), ([2, 3, 5, 6], [1, 2])
"""Ends of pieces of text in each row, in tokens of the student and of the teacher."""


def logs(seed, *shape):
    random = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(*shape, generator=random, dtype=torch.float64)).log_softmax(-1)


def tables(rows, widths=(7, 8)):
    """``[B, T, 3]`` and the pieces as ``(row, begin, count, other_begin, other_count)``."""
    table, pieces = torch.zeros(len(rows), widths[0], 3, dtype=torch.int64), []
    for row, (ends, others) in enumerate(rows):
        for (begin, end), (low, high) in zip(pairwise([0, *ends]), pairwise([0, *others]), strict=True):
            table[row, begin] = torch.tensor([end - begin, low, high - low])
            pieces.append((row, begin, end - begin, low, high - low))
    return table, pieces


def chained(values, ids, begin, count, merge):
    """The measure of a piece, by the chain rule."""
    at = begin + count - 1 if merge == "last" else begin
    factor = math.prod(math.exp(values[place][ids[place]]) for place in range(begin, begin + count) if place != at)
    return [math.exp(value) * factor for value in values[at]]


def generalised(p, q, beta):
    """KL of two measures and what lies between, term by term."""
    if beta == 0:
        return sum(a * math.log(a / b) - a + b for a, b in zip(p, q, strict=True))
    if beta == 1:
        return generalised(q, p, 0)
    middle = [beta * a + (1 - beta) * b for a, b in zip(p, q, strict=True)]
    first, second = (sum(a * math.log(a / m) for a, m in zip(each, middle, strict=True)) for each in (p, q))
    return beta * first + (1 - beta) * second


def reference(teacher, student, beta, weights, pairs):
    shared = [teacher[a] for a, _ in pairs], [student[b] for _, b in pairs]
    alone = [
        sorted((value for place, value in enumerate(each) if place not in taken), reverse=True)
        for each, taken in ((teacher, {a for a, _ in pairs}), (student, {b for _, b in pairs}))
    ]
    distance = sum(abs(a - b) for a, b in zip_longest(*alone, fillvalue=0.0))
    return weights[0] * generalised(*shared, beta) + weights[1] * distance


@pytest.mark.parametrize("merge", ["last", "first"])
@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("pairs", [SHARED, SHARED[:0]])
def test_the_loss_of_pieces_is_that_of_a_loop(merge, beta, pairs):
    teacher, student = logs(0, ROWS, 8, TEACHER), logs(1, ROWS, 7, STUDENT).requires_grad_()
    table, pieces = tables([*zip(ENDS, OTHER_ENDS, strict=True)])
    ids, other_ids = torch.arange(14).reshape(2, 7) % STUDENT, torch.arange(16).reshape(2, 8) % TEACHER
    spans = Spans.of(table)
    mine, theirs = (
        measures(values, values.gather(-1, own.unsqueeze(-1)).squeeze(-1), (spans.rows, *places), merge)[0]
        for values, own, places in (
            (student, ids, (spans.begin, spans.count)),
            (teacher, other_ids, (spans.other_begin, spans.other_count)),
        )
    )
    found, matched, others = whole_loss(theirs, mine, pairs, beta, (0.7, 0.3))
    expected = [
        reference(
            chained(teacher[row].tolist(), other_ids[row].tolist(), low, width, merge),
            chained(student[row].tolist(), ids[row].tolist(), begin, count, merge),
            beta,
            (0.7, 0.3),
            pairs.tolist(),
        )
        for row, begin, count, low, width in pieces
    ]
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-14)
    torch.testing.assert_close(found, 0.7 * matched + 0.3 * others)
    assert (matched >= -1e-12).all()
    assert (others > 0).all()


@pytest.mark.parametrize("merge", ["last", "first"])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("top_k", [0, 4])
def test_the_gradient_is_that_of_finite_differences(merge, beta, top_k):
    teacher, raw = (
        logs(0, ROWS, 8, TEACHER),
        torch.randn(ROWS, 7, STUDENT, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_(),
    )
    spans = Spans.of(tables([*zip(ENDS, OTHER_ENDS, strict=True)])[0])
    ids = torch.arange(14).reshape(2, 7, 1) % STUDENT
    logs_of = teacher.gather(-1, torch.arange(16).reshape(2, 8, 1) % TEACHER).squeeze(-1)

    def loss(raw):
        student = raw.log_softmax(-1)
        mine = measures(student, student.gather(-1, ids).squeeze(-1), (spans.rows, spans.begin, spans.count), merge)
        theirs, others = measures(teacher, logs_of, (spans.rows, spans.other_begin, spans.other_count), merge)
        if not top_k:
            return whole_loss(theirs, mine[0], SHARED, beta, (0.7, 0.3))[0]
        likeliest = theirs.topk(top_k)
        return likeliest_loss((likeliest.values, likeliest.indices, others), mine, SHARED, beta, (0.7, 0.3))[0]

    assert torch.autograd.gradcheck(loss, (raw,), eps=1e-6, atol=1e-6, rtol=1e-5)


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 10**6), beta=st.sampled_from([0.0, 0.2, 0.5, 1.0]), k=st.integers(1, TEACHER), shared=st.integers(0, 4)
)
def test_the_likeliest_tokens_and_one_for_the_rest_are_those_of_a_loop(seed, beta, k, shared):
    teacher, student, pairs = logs(seed, 1, TEACHER), logs(seed + 1, 1, STUDENT), SHARED[:shared]
    likeliest, one = teacher.topk(k), torch.zeros(1, dtype=torch.float64)
    found = likeliest_loss((likeliest.values, likeliest.indices, one), (student, one), pairs, beta, (0.6, 0.4))[0]
    of = dict(pairs.tolist())
    p, q = teacher[0].exp().tolist(), student[0].exp().tolist()
    chosen = likeliest.indices[0].tolist()
    both = [(p[a], q[of[a]]) for a in chosen if a in of]
    mine = sorted((value for place, value in enumerate(q) if place not in of.values()), reverse=True)
    alone = [(p[a], b) for a, b in zip_longest([a for a in chosen if a not in of], mine, fillvalue=None) if a is not None]
    alone = [(a, b or 0.0) for a, b in alone]
    rest = [max(1 - sum(pair[side] for pair in [*both, *alone]), -math.expm1(-1e-6)) for side in (0, 1)]
    distance = sum(abs(a - b) for a, b in alone)
    if pairs.tolist():
        expected = 0.6 * generalised(*zip(*both, rest, strict=True), beta) + 0.4 * distance
    else:
        expected = 0.4 * (distance + abs(rest[0] - rest[1]))
    assert float(found) == pytest.approx(expected, rel=1e-6, abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(1e-9, 1), st.floats(1e-9, 1)), min_size=1, max_size=6), st.sampled_from([0.0, 0.4, 1.0]))
def test_measures_that_do_not_sum_to_one_are_nearest_where_they_are_equal(pairs, beta):
    teacher, student = torch.tensor(pairs, dtype=torch.float64).log().unbind(-1)
    assert float(measure_divergence(teacher, student, beta)) >= -1e-12
    same = teacher.clone().requires_grad_()
    measure_divergence(teacher, same, beta).backward()
    assert float(measure_divergence(teacher, teacher, beta)) == pytest.approx(0, abs=1e-12)
    assert same.grad.abs().max() < 1e-9


def one_row(count, other_count):
    """A batch with one row, and its row in the teacher's tokens, of random tokens."""
    batch = make_batch([count])
    random = torch.Generator().manual_seed(5)
    batch.completion_ids = torch.randint(STUDENT, (1, count), generator=random)
    other = make_batch([other_count])
    other.completion_ids = torch.randint(TEACHER, (1, other_count), generator=random)
    return batch, other


def terms_of(plugin, outputs, batch):
    items = list(plugin.compute_loss(outputs, batch))
    return {one.name: one for one in items if isinstance(one, LossTerm)}, {
        one.name: one for one in items if isinstance(one, Metric)
    }


@pytest.mark.parametrize("top_k", [0, 5])
def test_workers_get_the_loss_at_the_first_token_of_each_piece(top_k):
    batch, seen = one_row(6, 6)
    table = tables([([1, 3, 4, 6], [2, 3, 5, 6])], (6, 6))[0]
    table[0, 3] = 0  # one that is not in the loss
    taught = table[..., 0] > 0
    batch.rows = {"math": seen}
    batch.own = {
        "math/spans": table, "math/shared": SHARED[None, None], "math/vocabulary": float(TEACHER), "math/taught": taught,
        "math/read": torch.ones(1, 6, dtype=torch.bool), "taught": taught,
    }  # fmt: skip
    teacher, student = logs(0, 1, 6, TEACHER), logs(1, 1, 6, STUDENT).requires_grad_()
    of_tokens = [
        each.gather(-1, rows.completion_ids.unsqueeze(-1)).squeeze(-1) for each, rows in ((teacher, seen), (student, batch))
    ]
    outputs = Outputs(logprobs=of_tokens[1], others={"math": Distribution(teacher, student)}, logits=student)
    if top_k:
        outputs.others = {}
        seen.distributions["math"] = TopK(*teacher.topk(top_k))
        seen.logprobs["math"] = of_tokens[0]
    options = Distill.Options(teachers={"math": 0.5}, own_tokens=True, beta=0.5, top_k=top_k)
    terms, metrics = terms_of(Distill(options), outputs, batch)
    assert [*terms] == ["math/divergence"]
    term = terms["math/divergence"]
    assert (term.coefficient, term.mask.name) == (0.5, "math/taught")
    assert (term.values != 0).tolist() == taught.tolist()
    assert float(metrics["math/aligned"].values.mean()) == pytest.approx(5 / 6)
    ones = [[one == 1 == other for one, _, other in row] for row in batch.own["math/spans"].tolist()]
    assert metrics["math/same_tokens"].values.tolist() == ones
    if not top_k:
        share = len(SHARED) / TEACHER
        first = [chained(teacher[0].tolist(), seen.completion_ids[0].tolist(), 0, 2, "last"), student[0, 0].exp().tolist()]
        expected = reference(*first, 0.5, (share, 1 - share), SHARED.tolist())
        assert term.values[0, 0].item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("top_k", [0, 3])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_with_the_same_tokens_it_is_distillation_token_by_token(beta, top_k, temperature):
    if top_k and temperature != 1:
        return
    batch, _ = one_row(5, 5)
    batch.rows = {"teacher": batch}
    ends = [1, 2, 3, 4, 5]
    table, taught = tables([(ends, ends)], (5, 5))[0], torch.ones(1, 5, dtype=torch.bool)
    pairs = torch.arange(STUDENT).repeat(2, 1).T[None, None]
    batch.own = {
        "teacher/spans": table, "teacher/shared": pairs, "teacher/vocabulary": float(STUDENT), "teacher/taught": taught,
        "teacher/read": taught, "taught": taught,
    }  # fmt: skip
    teacher, student = logs(0, 1, 5, STUDENT).float(), logs(1, 1, 5, STUDENT).float()
    likeliest = TopK(*teacher.topk(3))
    at = student.gather(-1, likeliest.ids)
    both = Distribution(likeliest.logprobs, at, likeliest.ids) if top_k else Distribution(teacher, student)
    batch.distributions["teacher"] = likeliest
    batch.logprobs["teacher"] = teacher.gather(-1, batch.completion_ids.unsqueeze(-1)).squeeze(-1)
    options = {"beta": beta, "top_k": top_k, "temperature": temperature}
    plain, _ = terms_of(
        Distill(Distill.Options(**options)),
        Outputs(logprobs=torch.zeros(1, 5), others={"teacher": both}),
        batch,
    )
    outputs = Outputs(logprobs=torch.zeros(1, 5), others={"teacher": Distribution(teacher, student)}, logits=student)
    own, _ = terms_of(Distill(Distill.Options(own_tokens=True, **options)), outputs, batch)
    torch.testing.assert_close(own["teacher/divergence"].values, plain["divergence"].values, rtol=1e-5, atol=1e-6)


def test_pieces_share_the_difference_of_their_log_probabilities():
    table, pieces = tables([*zip(ENDS, OTHER_ENDS, strict=True)])
    teacher, student = logs(0, ROWS, 8, TEACHER)[..., 0], logs(1, ROWS, 7, STUDENT)[..., 0]
    known = torch.ones(ROWS, 7, dtype=torch.bool)
    known[1, 2] = False
    gaps, shares, mask = span_gaps(table, teacher, student, known)
    expected, parts = torch.zeros(ROWS, 7), torch.zeros(ROWS, 7)
    for row, begin, count, low, width in pieces:
        if known[row, begin : begin + count].all():
            gap = float(teacher[row, low : low + width].sum() - student[row, begin : begin + count].sum())
            expected[row, begin : begin + count], parts[row, begin : begin + count] = gap, gap / count
    torch.testing.assert_close(gaps, expected)
    torch.testing.assert_close(shares, parts)
    assert mask.tolist() == (expected != 0).tolist()


def test_the_log_probability_of_other_tokens_keeps_its_digits_in_long_rows():
    """Sums of 4,000 tokens in 32 bits would lose what one token says."""
    values = torch.full((1, 4000), -7.123456, dtype=torch.float64)
    _, others = joint(values, torch.tensor([0]), torch.tensor([3990]), torch.tensor([3]), "last")
    assert float(others) == pytest.approx(-14.246912, rel=1e-12)


@pytest.mark.parametrize(
    ("plugin", "options", "message"),
    [
        (Distill, {"teachers": {}}, "teachers"),
        (Distill, {"teachers": {"Math": 1}}, "'Math' is no name for a teacher"),
        (Distill, {"teachers": {"actor": 1}}, "none of the host's roles"),
        (Distill, {"teachers": {"math": 0}}, "weight of 'math' is 0"),
        (Distill, {"across": "uld"}, "across is for teachers with other tokenizers: set own_tokens"),
        (Distill, {"own_tokens": True, "across": "uld", "beta": 0.5}, "no beta"),
        (Distill, {"own_tokens": True, "across": "uld", "shared_weight": 1, "others_weight": 1}, "has no shared_weight"),
        (Distill, {"own_tokens": True, "shared_weight": 1}, "set both"),
        (Distill, {"own_tokens": True, "top_k": 8, "tail": "renormalise"}, "leave tail out"),
        (OnPolicyDistill, {"own_tokens": True, "across": "uld"}, "signal sample compares sampled texts and has no across"),
        (OnPolicyDistill, {"own_tokens": True, "merge": "first"}, "has no merge"),
    ],
)
def test_options_without_effect_are_refused(plugin, options, message):
    with pytest.raises(ValueError, match=message):
        plugin.Options(**options)
