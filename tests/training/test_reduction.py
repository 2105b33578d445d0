"""Loss reduction: each aggregation against a float64 loop, and exact whatever the split."""

import pytest
import torch
from rlhf_authoring.tensors import make_batch

from rlhf_host.records.ragged import RaggedTensor, Rows
from rlhf_host.records.tensors import Aggregation, Extra, LossTerm, Mask, Metric
from rlhf_host.training.corrections import Corrections
from rlhf_host.training.reduction import Denominators, Metrics, Reducer, reduced, token_weights

GROUPS, EPISODES = [0, 0, 0, 1, 1, 2], [0, 0, 1, 2, 3, 4]


def loop(aggregation, values, mask, groups, episodes):
    """The definitions, written out; an episode's k rows weigh 1/k, rows without tokens count nowhere."""
    rows = [[v for v, m in zip(vs, ms, strict=True) if m] for vs, ms in zip(values.tolist(), mask.tolist(), strict=True)]
    present = [i for i, row in enumerate(rows) if row]
    if aggregation == "token-mean":
        tokens = [v for row in rows for v in row]
        return sum(tokens) / len(tokens)
    if aggregation == "group-mean-token-mean":
        per = {g: [v for i in present if groups[i] == g for v in rows[i]] for g in {groups[i] for i in present}}
        return sum(sum(tokens) / len(tokens) for tokens in per.values()) / len(per)
    per_row = {i: sum(rows[i]) for i in present}
    if aggregation == "sequence-mean-token-mean":
        per_row = {i: total / len(rows[i]) for i, total in per_row.items()}
    if aggregation.startswith("sequence-mean-token-sum-over"):
        per_row = {i: total / 10 for i, total in per_row.items()}
    per_episode = {}
    for i in present:
        per_episode.setdefault(episodes[i], []).append(per_row[i])
    return sum(sum(r) / len(r) for r in per_episode.values()) / len(per_episode)


AGGREGATIONS = [
    "token-mean",
    "sequence-mean-token-mean",
    "sequence-mean-token-sum",
    "sequence-mean-token-sum-over(10)",
    "group-mean-token-mean",
]


def uneven_batch():
    batch = make_batch([3, 7, 5, 1, 6, 4], groups=GROUPS, observations=True, seed=5)
    batch.episode_id = torch.tensor(EPISODES)
    batch.loss_mask[3] = False  # a fully masked row
    return batch


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_every_aggregation_matches_its_definition(aggregation):
    batch = uneven_batch()
    values = torch.randn(batch.loss_mask.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = token_weights(Aggregation.parse(aggregation), batch.loss_mask, batch.group_id, batch.episode_id)
    expected = loop(aggregation, values, batch.loss_mask, GROUPS, EPISODES)
    assert float((weights * values).sum()) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("split", [[[0, 1, 2, 3, 4, 5]], [[5], [0, 3], [2, 1, 4]], [[0], [1], [2], [3], [4], [5]]])
def test_micro_batches_add_up_to_the_whole_in_any_order(aggregation, split):
    batch = uneven_batch()
    values = torch.randn(batch.loss_mask.shape, generator=torch.Generator().manual_seed(1))
    whole = float(
        (token_weights(Aggregation.parse(aggregation), batch.loss_mask, batch.group_id, batch.episode_id) * values).sum()
    )
    reducer = Reducer(Denominators.of(batch))
    total = 0.0
    for rows in split:
        part = batch.select(rows)
        term = LossTerm("policy", values[rows][:, : part.completion_ids.shape[1]], aggregation=Aggregation.parse(aggregation))
        total += float(reducer.reduce(term, rows, None))
    assert total == pytest.approx(whole, rel=1e-5)


def test_masked_nan_in_values_reaches_neither_loss_nor_gradient():
    batch = uneven_batch()
    values = torch.ones(batch.loss_mask.shape)
    values[~batch.loss_mask] = float("nan")
    values.requires_grad_()
    loss = Reducer(Denominators.of(batch)).reduce(LossTerm("policy", values), list(range(6)), None)
    loss.backward()
    assert float(loss) == pytest.approx(1.0)
    assert torch.isfinite(values.grad).all()


@pytest.mark.parametrize("change", [lambda mask: ~mask, lambda mask: mask[torch.tensor([2, 0, 1, 5, 4, 3])]])
def test_a_mask_of_a_plugin_counts_the_batch_s_tokens_alone(change):
    batch = uneven_batch()
    rows = Rows.of(batch.completion_mask)
    plain = batch.map(lambda _, value: value)
    batch.action_mask = RaggedTensor(rows.tokens(batch.action_mask), rows)
    for each in (plain, batch):
        each.extra = {"p": {"m": change(each.action_mask)}}
    expected, found = (Denominators.of(each).mask(Extra("m"), "p") for each in (plain, batch))
    assert torch.equal(found.padded(), expected.padded())
    term = LossTerm("kl", torch.ones(batch.loss_mask.shape), mask=Extra("m"))
    assert float(Reducer(Denominators.of(batch)).reduce(term, list(range(6)), None, "p")) == pytest.approx(1.0)


def test_a_fully_masked_batch_gives_zero():
    batch = uneven_batch()
    batch.loss_mask[:] = False
    for aggregation in AGGREGATIONS:
        values = torch.ones(batch.loss_mask.shape, requires_grad=True)
        loss = Reducer(Denominators.of(batch)).reduce(
            LossTerm("policy", values, aggregation=Aggregation.parse(aggregation)), list(range(6)), None
        )
        assert float(loss) == 0.0


def test_corrections_multiply_corrected_terms_only_and_leave_the_denominator():
    batch = uneven_batch()
    rows = list(range(6))
    half = torch.zeros(batch.loss_mask.shape)
    half[:, 0] = 1.0
    corrections = Corrections(
        half, torch.tensor([2.0, 1.0, 1.0, 9.0, 1.0, 0.0]), frozenset({"tokens", "rows"}), frozenset({"rows"})
    )
    values = torch.ones(batch.loss_mask.shape)
    kept = float((batch.loss_mask & (half > 0)).sum() / batch.loss_mask.sum())
    assert float(
        Reducer(Denominators.of(batch)).reduce(LossTerm("policy", values, corrected=True), rows, corrections)
    ) == pytest.approx(kept)
    assert float(Reducer(Denominators.of(batch)).reduce(LossTerm("value", values), rows, corrections)) == pytest.approx(1.0)
    pairs = LossTerm("pairs", torch.ones(6), corrected=True)  # rows 0 and 1 are one episode, row 3 is masked
    assert float(Reducer(Denominators.of(batch)).reduce(pairs, rows, corrections)) == pytest.approx((1.5 + 1 + 1 + 0) / 4)
    assert corrections.of(pairs.values)[1] == {"rows"}
    assert corrections.of(values)[1] == {"tokens", "rows"}


def test_row_terms_average_over_rows_of_the_whole_batch():
    batch = uneven_batch()
    reducer = Reducer(Denominators.of(batch))
    values = torch.tensor([1.0, 3.0, 5.0, 100.0, 7.0, 9.0])  # row 3 is masked; rows 0 and 1 are one episode
    total = sum(float(reducer.reduce(LossTerm("pair", values[rows]), rows, None)) for rows in ([4, 0], [3, 1], [2, 5]))
    assert total == pytest.approx((2.0 + 5.0 + 7.0 + 9.0) / 4)


def test_a_plugin_s_own_mask_is_its_own():
    batch = uneven_batch()
    first = torch.zeros_like(batch.loss_mask)
    first[:, 0] = True
    batch.extra["mine"] = {"first": first, "floats": first.float(), "row": first[:, 0]}
    term = LossTerm("first", torch.arange(42.0).view(6, 7), mask=Extra("first"))
    rows = list(range(6))
    assert float(Reducer(Denominators.of(batch)).reduce(term, rows, None, "mine")) == pytest.approx(sum(range(0, 42, 7)) / 6)
    for alias, name in (("other", "first"), ("mine", "floats"), ("mine", "row")):
        wrong = LossTerm("first", term.values, mask=Extra(name))
        with pytest.raises(ValueError, match=f"Extra\\(name='{name}'\\), and prepare_batch gave no tensor"):
            Reducer(Denominators.of(batch)).reduce(wrong, rows, None, alias)


@pytest.mark.parametrize("mask", [Mask("no_such_mask"), Mask("rewards"), Extra("nothing")])
def test_an_unknown_mask_is_named(mask):
    batch = uneven_batch()
    with pytest.raises(ValueError, match=mask.name):
        Reducer(Denominators.of(batch)).reduce(
            LossTerm("policy", torch.ones(batch.loss_mask.shape), mask=mask), list(range(6)), None
        )


def test_values_of_the_wrong_shape_are_named():
    batch = uneven_batch()
    with pytest.raises(ValueError, match="'policy' has shape"):
        Reducer(Denominators.of(batch)).reduce(LossTerm("policy", torch.ones(2, 2)), [0, 1, 2], None)


def test_metrics_combine_exactly_over_parts():
    whole, parts = Metrics(), Metrics()
    values = torch.arange(10.0)
    mask = values != 3
    for reduce in ("mean", "sum", "min", "max", "ess"):
        whole.add([Metric(reduce, values, mask, reduce)])
        for part in (slice(0, 1), slice(1, 8), slice(8, 10)):
            parts.add([Metric(reduce, values[part], mask[part], reduce)])
    assert parts.result() == pytest.approx(whole.result())
    ess = 42**2 / (9 * sum(value**2 for value in (0, 1, 2, 4, 5, 6, 7, 8, 9)))
    assert whole.result() == {"mean": pytest.approx(42 / 9), "sum": 42.0, "min": 0.0, "max": 9.0, "ess": pytest.approx(ess)}
    joined = Metrics()
    joined.join(whole, "critic/")
    joined.merge(Metrics())
    assert joined.result()["critic/ess"] == pytest.approx(ess)


def test_the_effective_sample_size_of_a_steps_updates_is_that_of_all_their_weights():
    step = Metrics()
    for values in ([1.0, 1.0], [3.0], [0.0]):
        update = Metrics()
        update.add([Metric("ess", torch.tensor(values), reduce="ess")])
        step.merge(update)
    assert step.result() == {"ess": pytest.approx(5**2 / (4 * 11))}
    nothing = Metrics()
    nothing.add([Metric("ess", torch.zeros(3), reduce="ess")])
    assert nothing.result() == {"ess": 0.0}


def test_the_calibration_error_is_that_of_all_predictions_however_they_are_split():
    """Of a predictor that is 95 % sure and right in 4 of 5 cases, 62 % sure and right in 1 of 2, and once in doubt."""
    given = torch.tensor([0.95, 0.95, 0.95, 0.95, 0.05, 0.62, 0.38, 0.5])
    bins = {0.95: (5, 4), 0.62: (2, 1), 0.5: (1, 0.5)}
    error = sum(abs(sure * count - right) for sure, (count, right) in bins.items()) / 8
    whole, parts = Metrics(), Metrics()
    whole.add([Metric("error", given, reduce="calibration")])
    for part in (given[:3], given[3:4], given[4:]):
        other = Metrics()
        other.add([Metric("error", part, torch.ones(part.shape, dtype=torch.bool), reduce="calibration")])
        parts.merge(other)
    assert whole.result() == parts.result() == {"error": pytest.approx(error)}
    exact = torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])
    assert [reduced([Metric("error", each, reduce="calibration")])["error"] for each in exact] == [0.5, 0.0]


def test_merging_updates_averages_their_sums():
    """A loss term's shares add up within an optimizer batch; over a step's updates they are averaged."""
    step = Metrics()
    for value in (1.0, 3.0):
        update = Metrics()
        update.add([Metric("loss/policy", value / 2, reduce="sum"), Metric("loss/policy", value / 2, reduce="sum")])
        step.merge(update)
    assert step.result() == {"loss/policy": 2.0}
