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
        return likeliest_loss((likeliest.values, likeliest.indices, others), mine, SHARED, TEACHER, beta, (0.7, 0.3))[0]

    assert torch.autograd.gradcheck(loss, (raw,), eps=1e-6, atol=1e-6, rtol=1e-5)


def of_likeliest(teacher, student, wholes, k, beta, weights, pairs):
    """The loss of a piece of text from the teacher's ``k`` likeliest tokens, token by token.

    Args:
        wholes: sums of the two measures, which are the probabilities of the piece's other tokens.
    """
    of, chosen = dict(pairs), sorted(range(len(teacher)), key=teacher.__getitem__, reverse=True)[:k]
    both = [(teacher[a], student[of[a]]) for a in chosen if a in of]
    theirs = [teacher[a] for a in chosen if a not in of]
    ours = sorted((value for place, value in enumerate(student) if place not in of.values()), reverse=True)
    every = len(teacher) - len(pairs)  # of the teacher's tokens that the student has not
    alone = [*zip_longest(theirs, ours[: len(theirs)], fillvalue=0.0), *((0.0, value) for value in ours[every:])]
    sums = [sum(pair[side] for pair in [*both, *alone]) for side in (0, 1)]
    rest = [max(whole - own, -math.expm1(-1e-6) * whole) for whole, own in zip(wholes, sums, strict=True)]
    distance = sum(abs(a - b) for a, b in alone)
    if not pairs:
        return weights[1] * (distance + abs(rest[0] - rest[1]))
    return weights[0] * generalised(*zip(*both, rest, strict=True), beta) + weights[1] * distance


VOCABULARIES = st.tuples(st.integers(1, 14), st.integers(1, 14), st.floats(0, 1))
"""A teacher's and the student's number of tokens, and the share of the smaller one that both have."""


def pairs_of(seed, teacher, student, share):
    """``[S, 2]``: the numbers of random tokens that two vocabularies share."""
    random, count = torch.Generator().manual_seed(seed), round(share * min(teacher, student))
    return torch.stack([torch.randperm(size, generator=random)[:count] for size in (teacher, student)], -1)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6), sizes=VOCABULARIES, beta=st.sampled_from([0.0, 0.2, 0.5, 1.0]), k=st.integers(1, 14),
    others=st.tuples(st.floats(-9, 0), st.floats(-9, 0)),
)  # fmt: skip
def test_the_likeliest_tokens_and_one_for_the_rest_are_those_of_a_loop(seed, sizes, beta, k, others):
    """In vocabularies of any sizes, also where the student has more tokens of its own than the teacher."""
    size, own, _ = sizes
    k, pairs = min(k, size), pairs_of(seed, *sizes)
    one = [torch.tensor([value], dtype=torch.float64) for value in others]
    teacher, student = (logs(seed + place, 1, each) + one[place] for place, each in enumerate((size, own)))
    likeliest = teacher.topk(k)
    values = (likeliest.values, likeliest.indices, one[0]), (student, one[1])
    found = likeliest_loss(*values, pairs, size, beta, (0.6, 0.4))[0]
    plain = [each[0].exp().tolist() for each in (teacher, student)]
    wholes = [math.exp(value) for value in others]
    expected = of_likeliest(*plain, wholes, k, beta, (0.6, 0.4), pairs.tolist())
    assert float(found) == pytest.approx(expected, rel=1e-6, abs=1e-9)
    if k == size:
        whole = whole_loss(teacher, student, pairs, beta, (0.6, 0.4))[0]
        assert float(found) == pytest.approx(float(whole), rel=1e-5, abs=2e-6 * max(wholes) * (1 + abs(others[0] - others[1])))


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


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    sizes=st.lists(VOCABULARIES, min_size=1, max_size=3),
    k=st.integers(1, 13),
    across=st.sampled_from(["gold", "uld"]),
    merge=st.sampled_from(["last", "first"]),
    beta=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_each_of_several_teachers_gives_the_loss_of_a_loop(seed, sizes, k, across, merge, beta):
    """From whole distributions, from the likeliest tokens, and from all of them, as the host stores them: in 32 bits."""
    own, beta, names = sizes[0][1], 0.0 if across == "uld" else beta, [f"t{number}" for number in range(len(sizes))]
    batch, _ = one_row(6, 6)
    batch.completion_ids, table = batch.completion_ids % own, tables([([1, 3, 4, 6], [2, 3, 5, 6])], (6, 6))[0]
    pieces = [(begin, *each) for begin, each in enumerate(table[0].tolist()) if each[0]]
    taught = table[..., 0] > 0
    batch.own, batch.rows = {"taught": taught}, {}
    student = logs(seed, 1, 6, own).float()
    outputs = Outputs(logprobs=torch.zeros(1, 6), others={}, logits=student)
    expected, tops = {}, (0, k, 14)
    for number, (name, (size, _, share)) in enumerate(zip(names, sizes, strict=True)):
        seen, pairs = one_row(6, 6)[1], pairs_of(seed, size, own, share if across == "gold" else 0)
        seen.completion_ids = seen.completion_ids % size
        teacher = logs(seed + 1 + number, 1, 6, size).float()
        outputs.others[name], batch.rows[name] = Distribution(teacher, student), seen
        batch.own |= {
            f"{name}/spans": table, f"{name}/shared": pairs[None, None], f"{name}/vocabulary": float(size),
            f"{name}/taught": taught, f"{name}/read": torch.ones(1, 6, dtype=torch.bool),
        }  # fmt: skip
        seen.logprobs[name] = teacher.gather(-1, seen.completion_ids.unsqueeze(-1)).squeeze(-1)
        weights = (0.0, 1.0) if across == "uld" else (len(pairs) / size, 1 - len(pairs) / size)
        expected |= {(name, top): [] for top in tops}
        for begin, count, low, width in pieces:
            measured = [
                chained(values[0].tolist(), rows.completion_ids[0].tolist(), *place, merge)
                for values, rows, place in ((teacher, seen, (low, width)), (student, batch, (begin, count)))
            ]
            expected[name, 0].append(reference(*measured, beta, weights, pairs.tolist()))
            wholes = [sum(each) for each in measured]
            for top in tops[1:]:
                expected[name, top].append(of_likeliest(*measured, wholes, top, beta, weights, pairs.tolist()))
        assert expected[name, 14] == pytest.approx(expected[name, 0], rel=1e-5, abs=1e-5)
    for top in tops:
        options = {"teachers": dict.fromkeys(names, 1.0), "own_tokens": True, "across": across, "merge": merge, "beta": beta}
        for name, (size, _, _) in zip(names, sizes, strict=True):
            batch.rows[name].distributions = {name: TopK(*outputs.others[name].logprobs.topk(min(top, size)))} if top else {}
        terms, _ = terms_of(Distill(Distill.Options(**options, top_k=top)), outputs, batch)
        for name in names:
            found = terms[f"{name}/divergence"].values[taught].tolist()
            assert found == pytest.approx(expected[name, top], rel=1e-4, abs=3e-6), (name, top)


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


def test_rows_beside_a_batch_of_one_row_change_no_pairs():
    """There the host takes every tensor for one of rows, and gives those beside zeros. Here one comes first."""
    table = tables([([1, 3, 4, 6], [2, 3, 5, 6])], (6, 6))[0]
    own = {
        "spans": table,
        "taught": table[..., 0] > 0,
        "read": torch.ones(1, 6, dtype=torch.bool),
        "shared": SHARED[None, None],
    }
    found = []
    for rows in (1, 2):
        of_rows = {name: torch.cat([*[torch.zeros_like(value)] * (rows - 1), value]) for name, value in own.items()}
        batch, seen = (one.select([0] * rows) for one in one_row(6, 6))
        batch.rows = {"math": seen}
        batch.own = {f"math/{name}": value for name, value in of_rows.items()} | {"math/vocabulary": float(TEACHER)}
        both = (logs(seed, 1, 6, size).expand(rows, 6, size) for seed, size in ((0, TEACHER), (1, STUDENT)))
        outputs = Outputs(logprobs=torch.zeros(rows, 6), others={"math": Distribution(*both)})
        terms, _ = terms_of(Distill(Distill.Options(teachers={"math": 1.0}, own_tokens=True)), outputs, batch)
        found.append(terms["math/divergence"].values)
    torch.testing.assert_close(found[1][-1:], found[0])
    assert not found[1][0].any()


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
