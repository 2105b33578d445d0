"""KTO against hand-worked values."""

import importlib.metadata
import math

import pytest
import torch
from rlhf_authoring.tensors import make_batch
from rlhf_plugin_kto import KTO

from rlhf_host import Group, LossTerm, Metric, Outputs, Segment, Task, Trajectory


def row(number, label):
    segments = [Segment("prompt", [number]), Segment("action", [10 + number] * (number + 1))]
    return Trajectory(f"row-{number}", f"group-{number}", Task(""), segments, columns={"label": label})


def groups(count=3):
    rows = [row(number, float(number % 2)) for number in range(count)]
    return [Group(one.group_id, one.task, [one]) for one in rows]


def tokens(one):
    return [list(segment.token_ids) for segment in one.segments]


# --- rows ---------------------------------------------------------------------------------------------


def test_each_prompt_also_gets_the_completion_before_it_and_the_first_the_last():
    rows = KTO(KTO.Options()).make_rows(groups())
    assert [one.columns["mismatched"] for one in rows] == [0.0] * 3 + [1.0] * 3
    assert [tokens(one) for one in rows[:3]] == [[[0], [10]], [[1], [11, 11]], [[2], [12, 12, 12]]]
    assert [tokens(one) for one in rows[3:]] == [[[0], [12, 12, 12]], [[1], [10]], [[2], [11, 11]]]
    assert [one.group_id for one in rows] == ["group-0", "group-1", "group-2"] * 2
    assert len({one.episode_id for one in rows}) == 6


def paired(*prompts):
    """A row for each prompt, in that order; each has a completion of its own."""
    rows = [
        Trajectory(f"row-{i}", f"group-{i}", Task(""), [Segment("prompt", [prompt]), Segment("action", [10 + i])], columns={})
        for i, prompt in enumerate(prompts)
    ]
    return [Group(one.group_id, one.task, [one]) for one in rows]


@pytest.mark.parametrize("prompts", [(0, 0, 1, 1, 2, 2), (0, 0), (0, 0, 0, 1), (0, 1, 1, 0), (0, 0, 1, 1, 1, 2, 3, 3)])
def test_a_mismatched_completion_is_one_of_another_prompt(prompts):
    made = [tokens(one) for one in KTO(KTO.Options()).make_rows(paired(*prompts))[len(prompts) :]]
    asked = dict(zip(range(10, 10 + len(prompts)), prompts, strict=True))
    assert all(asked[answer] != prompt for [prompt], [answer] in made)
    answers = [answer for _, [answer] in made]
    assert len(set(answers)) == len(answers)  # none counts twice
    most = max(prompts.count(prompt) for prompt in prompts)
    assert len(made) == (len(prompts) if 2 * most <= len(prompts) else 2 * (len(prompts) - most))


def test_a_batch_of_one_prompt_is_said(caplog):
    plugin = KTO(KTO.Options())
    for _ in range(2):
        assert all(one.columns["mismatched"] == 0.0 for one in plugin.make_rows(paired(4, 4, 4)))
    assert caplog.messages == ["kto: all rows of a batch have one prompt, so the KL counts as 0: set a larger train.batch_size"]


def test_a_row_alone_has_no_other_completion():
    (only,) = KTO(KTO.Options()).make_rows(groups(1))
    assert only.columns == {"label": 0.0, "mismatched": 0.0}


def test_without_a_kl_there_are_no_other_rows():
    given = groups()
    assert KTO(KTO.Options(loss="apo_zero_unpaired")).make_rows(given) == [one.trajectories[0] for one in given]


# --- loss ---------------------------------------------------------------------------------------------


@pytest.fixture
def batch():
    """A desirable and an undesirable row with log-ratios 2 and 1, and two mismatched ones with 3 and 2."""
    batch = make_batch([2, 1, 1, 2])
    batch.episode_id = torch.arange(4)
    batch.columns |= {"label": torch.tensor([1.0, 0.0, 1.0, 0.0]), "mismatched": torch.tensor([0.0, 0.0, 1.0, 1.0])}
    batch.logprobs["reference"] = torch.full((4, 2), -5.0).masked_fill(~batch.action_mask, float("nan"))
    return batch


def outputs(batch):
    ratios = torch.tensor([2.0, 1.0, 3.0, 2.0]) / batch.lengths
    return Outputs(logprobs=torch.where(batch.action_mask, ratios.unsqueeze(-1) - 5, float("nan")))


def made(batch, **options):
    plugin = KTO(KTO.Options(**options))
    batch.loss_mask = batch.loss_mask & plugin.loss_masks(batch)
    items = list(plugin.compute_loss(outputs(batch), batch))
    metrics = {one.name: one for one in items if isinstance(one, Metric)}
    return next(one for one in items if isinstance(one, LossTerm)), metrics


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def test_the_kl_is_the_mean_over_mismatched_rows(batch):
    (metric,) = KTO(KTO.Options()).batch_statistics(outputs(batch), batch)
    assert metric.values[metric.mask].tolist() == pytest.approx([3.0, 2.0])
    assert metric.reduce == "mean"


def test_rows_are_compared_with_the_kl(batch):
    batch.stats = {"mismatched_kl": 2.5}
    term, metrics = made(batch, beta=0.5, desirable_weight=2.0, undesirable_weight=3.0)
    expected = [2 * (1 - sigmoid(0.5 * (2 - 2.5))), 3 * (1 - sigmoid(0.5 * (2.5 - 1)))]
    assert term.values[:2].tolist() == pytest.approx(expected)
    assert batch.loss_mask.any(-1).tolist() == [True, True, False, False]
    assert metrics["kl"].values == 2.5
    for name, values in {"rewards/chosen": [1.0], "rewards/rejected": [0.5], "desirable": [1.0, 0.0]}.items():
        assert metrics[name].values[metrics[name].mask].tolist() == pytest.approx(values)


def test_a_kl_below_0_counts_as_0(batch):
    batch.stats = {"mismatched_kl": -1.0}
    term, metrics = made(batch, beta=0.5)
    assert term.values[:2].tolist() == pytest.approx([1 - sigmoid(1.0), 1 - sigmoid(-0.5)])
    assert metrics["kl"].values == 0.0


def test_apo_zero_unpaired_compares_with_0(batch):
    del batch.columns["mismatched"]
    term, metrics = made(batch, loss="apo_zero_unpaired", beta=0.5)
    assert term.values[:2].tolist() == pytest.approx([1 - sigmoid(1.0), sigmoid(0.5)])
    assert "kl" not in metrics


def test_a_batch_that_make_rows_did_not_make_is_an_error(batch):
    del batch.columns["mismatched"]
    with pytest.raises(ValueError, match="kto trains on the rows of its make_rows"):
        made(batch)


def test_needs_and_entry_point():
    needs = KTO(KTO.Options()).needs()
    assert (needs.data, needs.rewards) == ("unpaired", False)
    assert [(role.name, role.trainable, role.lr) for role in needs.roles] == [("actor", True, 1e-6), ("reference", False, None)]
    assert [(forbid.setting, forbid.value) for forbid in needs.forbids] == [("train.batch_size", 1)]
    assert KTO(KTO.Options(loss="apo_zero_unpaired")).needs().forbids == ()
    (entry,) = [e for e in importlib.metadata.entry_points(group="rlhf.algos") if e.name == "kto"]
    assert entry.load() is KTO
