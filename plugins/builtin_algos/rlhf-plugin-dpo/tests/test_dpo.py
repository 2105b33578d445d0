"""DPO, conservative DPO and IPO against hand-worked values."""

import importlib.metadata
import math

import pytest
import torch
from rlhf_authoring.tensors import make_batch
from rlhf_plugin_dpo import CDPO, CPO, DPO, IPO, TPO

from rlhf_host import LossTerm, Metric, Outputs


@pytest.fixture
def batch():
    """Two pairs, apart from each other, whose log-ratios sum to 3 and 1, and to -2 and 2."""
    batch = make_batch([3, 2, 1, 2])
    batch.unit_id = batch.episode_id = torch.tensor([7, 4, 7, 4])
    batch.columns["label"] = torch.tensor([1.0, 0.0, 0.0, 1.0])
    batch.logprobs["reference"] = torch.full((4, 3), -5.0).masked_fill(~batch.loss_mask, float("nan"))
    return batch


SUMS = [3.0, 2.0, 1.0, -2.0]


def logprobs(batch):
    ratios = torch.tensor(SUMS) / batch.lengths
    return torch.where(batch.loss_mask, ratios.unsqueeze(-1) - 5, float("nan"))


def made(plugin, batch, **options):
    algorithm = plugin(plugin.Options(**options))
    batch.own = algorithm.prepare_batch(batch)
    items = list(algorithm.compute_loss(Outputs(logprobs=logprobs(batch)), batch))
    metrics = {one.name: one.values.tolist() for one in items if isinstance(one, Metric)}
    return {one.name: one for one in items if isinstance(one, LossTerm)}, metrics


def softplus(x):
    return math.log1p(math.exp(x))


def test_dpo_is_the_logistic_loss_of_the_gap(batch):
    terms, metrics = made(DPO, batch, beta=0.5)
    assert terms["preference"].values.tolist() == pytest.approx([softplus(-1), softplus(2), softplus(-1), softplus(2)])
    # Pair by pair, by unit_id.
    assert metrics["rewards/chosen"] == pytest.approx([-1.0, 1.5])
    assert metrics["rewards/rejected"] == pytest.approx([1.0, 0.5])
    assert metrics["rewards/margin"] == pytest.approx([-2.0, 1.0])
    assert metrics["accuracy"] == [0.0, 1.0]
    assert metrics["logprobs/chosen"] == pytest.approx([-12.0, -12.0])
    assert metrics["logprobs/rejected"] == pytest.approx([-8.0, -4.0])


def test_conservative_dpo_adds_a_share_of_the_other_order(batch):
    expected = 0.9 * softplus(-1) + 0.1 * softplus(1)
    terms, _ = made(CDPO, batch, beta=0.5)
    assert float(terms["preference"].values[0]) == pytest.approx(expected)
    assert made(DPO, batch, beta=0.5, label_smoothing=0.1)[0]["preference"].values.tolist() == pytest.approx(
        terms["preference"].values.tolist()
    )


def test_ipo_squares_the_distance_of_the_means_from_its_target(batch):
    terms, _ = made(IPO, batch, beta=0.25)
    assert float(terms["preference"].values[0]) == pytest.approx((1 - 1 - 2) ** 2)
    assert float(terms["preference"].values[1]) == pytest.approx((-1 - 1 - 2) ** 2)
    assert float(made(IPO, batch, beta=0.25, loss="ipo_sum")[0]["preference"].values[0]) == pytest.approx((3 - 1 - 2) ** 2)


def test_cpo_is_the_loss_of_log_probabilities_and_the_likelihood_of_the_chosen(batch):
    batch.logprobs.clear()
    terms, metrics = made(CPO, batch, beta=0.5)
    assert terms["preference"].values.tolist() == pytest.approx([softplus(4), softplus(2), softplus(4), softplus(2)])
    assert (terms["nll"].coefficient, str(terms["nll"].aggregation)) == (1.0, "token-mean")
    assert terms["nll"].values[0].tolist() == pytest.approx([4.0, 4.0, 4.0])
    assert metrics["accuracy"] == [0.0, 0.0]
    assert made(CPO, batch, nll_coef=0.0)[0].keys() == {"preference"}
    assert [role.name for role in CPO(CPO.Options()).needs().roles] == ["actor"]
    with pytest.raises(ValueError, match="CPO has no reference model"):
        CPO.Options(reference_free=False)
    with pytest.raises(ValueError, match="loss"):
        CPO.Options(loss="apo_zero")


def test_tpo_imitates_the_third_answer_and_compares_the_other_two():
    triples = make_batch([2, 3, 2, 1, 1, 2])
    triples.unit_id = triples.episode_id = torch.tensor([7, 4, 7, 4, 4, 7])
    nan = float("nan")
    triples.columns |= {"label": torch.tensor([nan, 1, 1, 0, nan, 0]), "gold": torch.tensor([1, nan, nan, nan, 1, nan])}
    algorithm = TPO(TPO.Options(beta=0.5, ld_alpha=0.5))
    triples.own = algorithm.prepare_batch(triples)
    assert triples.own["chosen"].tolist() == [[True, True, False], *[[False] * 3] * 3, [True, False, False], [False] * 3]
    logprobs = torch.where(triples.loss_mask, torch.tensor([-9.0, -1, -2, -3, -8, -4]).unsqueeze(-1), nan)
    items = {item.name: item for item in algorithm.compute_loss(Outputs(logprobs=logprobs), triples)}
    four, seven = softplus(0.5 * (-2.0 - -3.0) * -1), softplus(-0.5 * (-4.0 - -8.0))
    assert items["preference"].values.tolist() == pytest.approx([seven, four, seven, four, four, seven])
    assert items["nll"].values[0, :2].tolist() == [9.0, 9.0]
    assert items["rewards/chosen"].values.tolist() == pytest.approx([-1.0, -2.0])
    assert (algorithm.needs().data, [role.name for role in algorithm.needs().roles]) == ("triple", ["actor"])
    assert TPO(TPO.Options(nll_coef=0.0)).prepare_batch(triples) == {}
    with pytest.raises(ValueError, match="TPO has no reference model"):
        TPO.Options(reference_free=False)
    triples.columns["gold"] = torch.tensor([1, nan, nan, nan, nan, nan])
    with pytest.raises(ValueError, match="a pair is two rows with one unit_id"):
        algorithm.compute_loss(Outputs(logprobs=logprobs), triples)


def test_without_a_reference_the_log_probabilities_are_compared(batch):
    terms, _ = made(DPO, batch, beta=0.5, gamma=0.25, loss="sigmoid_norm", reference_free=True)
    gap = 0.5 * (-4 - -4) - 0.25
    assert float(terms["preference"].values[0]) == pytest.approx(softplus(-gap))
    batch.logprobs.clear()
    assert made(DPO, batch, loss="orpo")[0].keys() == {"preference", "nll"}


@pytest.mark.parametrize(("mean", "aggregation"), [("tokens", "token-mean"), ("rows", "sequence-mean-token-mean")])
def test_the_likelihood_of_the_chosen_is_a_term_over_their_tokens(batch, mean, aggregation):
    terms, _ = made(DPO, batch, nll_coef=0.3, nll_mean=mean)
    assert terms["nll"].coefficient == 0.3
    assert str(terms["nll"].aggregation) == aggregation
    assert batch.own["chosen"].any(-1).tolist() == [True, False, False, True]
    assert terms["nll"].mask.name == "chosen"
    assert terms["nll"].values[0].tolist() == pytest.approx([4.0, 4.0, 4.0])


def test_a_unit_that_is_no_pair_is_an_error(batch):
    for label in ([1.0, 0.0, 1.0, 1.0], [1.0, float("nan"), 0.0, 1.0]):
        batch.columns["label"] = torch.tensor(label)
        with pytest.raises(ValueError, match="a pair is two rows with one unit_id"):
            made(DPO, batch)
    del batch.columns["label"]
    with pytest.raises(ValueError, match="no column 'label'"):
        made(DPO, batch)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "hinge", "label_smoothing": 0.1}, "loss hinge has no label_smoothing"),
        ({"loss": "exo_pair"}, "exo_pair divides by label_smoothing"),
        ({"loss": "ipo", "gamma": 1.0}, "loss ipo has no gamma"),
        ({"loss": "apo_zero", "reference_free": True}, "leave reference_free out"),
        ({"loss": "ipo", "ld_alpha": 0.5}, "ld_alpha weighs sums"),
    ],
)
def test_options_without_effect_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        DPO.Options(**options)


def test_needs_and_entry_points():
    needs = DPO(DPO.Options()).needs()
    assert (needs.data, needs.unit_rows, needs.rewards) == ("preference", True, False)
    assert [(role.name, role.trainable, role.lr) for role in needs.roles] == [("actor", True, 1e-6), ("reference", False, None)]
    assert [(output.what, output.role) for output in needs.outputs] == [("logprobs", "reference")]
    for free in ({"reference_free": True}, {"loss": "orpo"}):
        needs = DPO(DPO.Options(**free)).needs()
        assert [role.name for role in needs.roles] == ["actor"]
        assert needs.outputs == ()
    entries = {e.name: e.load() for e in importlib.metadata.entry_points(group="rlhf.algos")}
    assert [entries[name] for name in ("dpo", "cdpo", "ipo", "cpo", "tpo")] == [DPO, CDPO, IPO, CPO, TPO]
