"""Corrections against loops in float64, what they must not depend on, and a run that shows their metrics."""

import dataclasses
import importlib.metadata
import inspect
import json
import math
import subprocess
import sys

import pytest
import rlhf_plugin_off_policy as off_policy
import torch
from click.testing import CliRunner
from pydantic import ValidationError
from rlhf_authoring import extension_contract
from rlhf_authoring.models import write_tiny_model
from rlhf_authoring.tensors import make_batch
from rlhf_plugin_off_policy import TIS, IcePop, OffPolicyMask, SequenceMask, SequenceTruncate

from rlhf_host import Outputs, PolicyLogprobs
from rlhf_host.cli.main import main

TestTIS = extension_contract("tis")
TestIcePop = extension_contract("icepop")
TestOffPolicyMask = extension_contract("off_policy_mask")
TestSequenceMask = extension_contract("sequence_mask")
TestSequenceTruncate = extension_contract("sequence_truncate")


def example(gaps=None, seed=3):
    """A batch of several turns with observations between; ``gaps``: log π_old − log μ, by default spread over ±0.8."""
    batch = make_batch([9, 4, 7, 1, 12, 5], observations=True, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    shape = batch.action_mask.shape
    gaps = torch.rand(shape, generator=generator) * 1.6 - 0.8 if gaps is None else torch.full(shape, gaps)
    batch.advantages = torch.randn(shape, generator=generator)
    batch.old_logprobs = torch.where(batch.action_mask, batch.sampler_logprobs + gaps, 0.0)
    current = torch.where(batch.action_mask, batch.old_logprobs - 0.3 * torch.rand(shape, generator=generator), 0.0)
    return batch, current


def weights(plugin, batch, current):
    found = plugin.importance_weights(PolicyLogprobs(current, batch.old_logprobs, batch.sampler_logprobs), batch)
    return found if found.dim() == 2 else torch.where(batch.action_mask, found.unsqueeze(-1), 1.0)


def looped(rule, batch, current):
    """``rule(log w per action token, drift per action token, advantage)`` → weight of each, in plain floats; 1 elsewhere."""
    expected = torch.ones(batch.action_mask.shape, dtype=torch.float64)
    for i, mask in enumerate(batch.action_mask):
        at = mask.nonzero()[:, 0].tolist()
        gaps = [float(batch.old_logprobs[i, t]) - float(batch.sampler_logprobs[i, t]) for t in at]
        drift = [float(batch.sampler_logprobs[i, t]) - float(current[i, t]) for t in at]
        advantages = [float(batch.advantages[i, t]) for t in at]
        for t, weight in zip(at, rule(gaps, drift, advantages), strict=True):
            expected[i, t] = weight
    return expected


def each(function):
    return lambda gaps, drift, advantages: [function(math.exp(x)) for x in gaps]


def whole(function):
    """One weight for the sequence."""
    return lambda gaps, drift, advantages: [function(gaps)] * len(gaps)


def per_token(kept, weight):
    return lambda gaps, drift, advantages: [weight(x) if kept(gaps) else 0.0 for x in gaps]


def mean(values):
    return sum(values) / len(values)


def k3(gaps):
    return mean([math.exp(x) - 1 - x for x in gaps])


def drifted(gaps, drift, advantages):
    return [0.0 if a < 0 and mean(drift) > 0.15 else 1.0 for a in advantages]


CASES = {
    "tis": (TIS, {"cap": 1.3}, each(lambda w: min(w, 1.3))),
    "tis, clipped": (TIS, {"low": 0.7, "high": 1.2}, each(lambda w: min(max(w, 0.7), 1.2))),
    "icepop": (IcePop, {"low": 0.8, "high": 1.5}, each(lambda w: w if 0.8 <= w <= 1.5 else 0.0)),
    "sequence_truncate": (SequenceTruncate, {"cap": 1.4}, whole(lambda gaps: min(math.exp(sum(gaps)), 1.4))),
    "sequence_mask by sum": (
        SequenceMask,
        {"low": 0.5, "high": 2.0},
        whole(lambda gaps: math.exp(sum(gaps)) if 0.5 <= math.exp(sum(gaps)) <= 2.0 else 0.0),
    ),
    "sequence_mask by geometric mean": (
        SequenceMask,
        {"statistic": "geometric", "low": 0.9, "high": 1.1, "token_weight": "token_truncated", "cap": 1.5},
        per_token(lambda gaps: 0.9 <= math.exp(mean(gaps)) <= 1.1, lambda x: min(math.exp(x), 1.5)),
    ),
    "sequence_mask by geometric mean, weighing the sequence": (
        SequenceMask,
        {"statistic": "geometric", "low": 0.5, "high": 2.0, "cap": 1.2},
        whole(lambda gaps: min(math.exp(sum(gaps)), 1.2) if 0.5 <= math.exp(mean(gaps)) <= 2.0 else 0.0),
    ),
    "sequence_mask by k3": (
        SequenceMask,
        {"statistic": "k3", "high": 0.1, "token_weight": "one"},
        per_token(lambda gaps: k3(gaps) <= 0.1, lambda x: 1.0),
    ),
    "off_policy_mask": (OffPolicyMask, {"delta": 0.15}, drifted),
}


@pytest.fixture(params=CASES)
def case(request):
    plugin, options, rule = CASES[request.param]
    return plugin(plugin.Options(**options)), rule


def test_weights_are_those_of_a_loop_in_float64(case):
    plugin, rule = case
    batch, current = example()
    expected = looped(rule, batch, current)
    found = weights(plugin, batch, current)
    assert torch.allclose(found.double(), expected, rtol=1e-5)
    tokens = expected[batch.action_mask]
    assert tokens.unique().numel() > 1, "the case decides nothing"


def test_masked_places_may_hold_anything(case):
    plugin, _ = case
    batch, current = example()
    expected = weights(plugin, batch, current)
    for garbage in (float("nan"), float("inf"), -1e30):
        for name in ("old_logprobs", "sampler_logprobs", "advantages"):
            setattr(batch, name, torch.where(batch.action_mask, getattr(batch, name), garbage))
        assert torch.equal(weights(plugin, batch, torch.where(batch.action_mask, current, garbage)), expected)


@pytest.mark.parametrize("gap", [50.0, -50.0])
def test_gaps_of_50_stay_finite(case, gap):
    plugin, _ = case
    batch, current = example(gap)
    found = weights(plugin, batch, current)
    assert found.isfinite().all()
    assert found.max() <= math.exp(20) * 1.001


def test_permuting_rows_permutes_weights_and_splitting_changes_nothing(case):
    plugin, _ = case
    batch, current = example()
    found = weights(plugin, batch, current)
    order = [4, 1, 5, 0, 3, 2]
    assert torch.equal(weights(plugin, batch.select(order, trim=False), current[order]), found[order])
    part = batch.select([1, 3])
    width = part.action_mask.shape[1]
    assert torch.equal(weights(plugin, part, current[[1, 3], :width]), found[[1, 3], :width])


def test_a_sum_of_opposite_gaps_is_not_cut_token_by_token():
    batch = make_batch([2])
    batch.old_logprobs = batch.sampler_logprobs + torch.tensor([[30.0, -30.5]])
    assert weights(SequenceTruncate(SequenceTruncate.Options()), batch, None)[0].tolist() == pytest.approx([math.exp(-0.5)] * 2)


def test_only_negative_advantages_are_masked_and_by_the_current_policy():
    batch = make_batch([2, 2])
    batch.advantages = torch.tensor([[1.0, -1.0], [-1.0, -1.0]])
    current = batch.sampler_logprobs - torch.tensor([[0.5, 0.1], [0.05, 0.05]])
    batch.old_logprobs = batch.sampler_logprobs - 9.0  # is not asked
    found = weights(OffPolicyMask(OffPolicyMask.Options(delta=0.2)), batch, current)
    assert found.tolist() == [[1.0, 0.0], [1.0, 1.0]]


def test_the_truncated_fraction_counts_tokens_in_the_loss():
    batch = make_batch([4, 4])
    batch.old_logprobs = batch.sampler_logprobs + torch.tensor([[0.0, 1.0, 1.0, 1.0], [1.0, 0.0, 0.0, 0.0]])
    batch.loss_mask[0, 3] = False
    outputs = Outputs(logprobs=batch.old_logprobs.clone().requires_grad_())
    (metric,) = TIS(TIS.Options()).compute_loss(outputs, batch)
    assert (metric.name, metric.values[metric.mask].mean().item()) == ("correction/truncated", pytest.approx(3 / 7))
    batch.old_logprobs = None  # fused: the ratio is against the policy of this very forward
    assert TIS(TIS.Options()).compute_loss(outputs, batch)[0].values.equal(metric.values)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (lambda: TIS.Options(low=3.0), "low 3 is above the upper bound 2"),
        (lambda: IcePop.Options(low=6.0), "low 6 is above the upper bound 5"),
        (lambda: SequenceMask.Options(statistic="geometric", low=1.5), "low 1.5 is above the upper bound 1.001"),
        (lambda: TIS.Options(C=2), "Extra inputs are not permitted"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValidationError, match=message):
        options()


def test_the_plugins_are_found_by_name_and_light_to_import():
    found = {e.name: e.load() for e in importlib.metadata.entry_points(group="rlhf.extensions")}
    named = {"tis": TIS, "icepop": IcePop, "off_policy_mask": OffPolicyMask}
    named |= {"sequence_mask": SequenceMask, "sequence_truncate": SequenceTruncate}
    assert {name: found.get(name) for name in named} == named
    assert len([line for line in inspect.getsource(off_policy).splitlines() if line.strip()]) < 150
    script = "import sys, rlhf_plugin_off_policy; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "False\n"


# --- through the command line -------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def run(tiny, tmp_path):
    for other in ("rlhf_plugin_rloo", "rlhf_plugin_math_verifier"):
        pytest.importorskip(other, reason="a whole run needs an algorithm and a reward")
    flags = ["train", "--algo", "rloo", "--reward", "math_verifier", "--actor.model", tiny, "--data", "arithmetic"]
    flags += ["--rollout.n", "2", "--rollout.max-new-tokens", "4", "--train.batch-size", "2", "--train.steps", "2"]
    flags += ["--train.threads", "1", "--run-dir", tmp_path / "run"]

    def invoke(*more):
        return CliRunner().invoke(main, [str(flag) for flag in [*flags, *more]])

    return invoke


def test_a_run_shows_the_metrics_of_its_corrections(run, tmp_path):
    result = run("--with", "tis", "--with", "icepop", "--with.tis.cap", "3")
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        assert row["mismatch/max"] < 1e-4, "the same module samples and trains"
        assert row["correction/mean"] == pytest.approx(1.0, abs=1e-4)
        assert row["correction/max"] == pytest.approx(1.0, abs=1e-4)
        assert row["correction/ess"] == pytest.approx(1.0, abs=1e-4)
        assert row["correction/zeroed"] == row["correction/truncated"] == 0.0


def test_weights_that_could_not_act_are_refused(run):
    result = run("--with", "tis", "--train.old-logprobs", "sampler")
    assert result.exit_code == 2
    message = "extension:tis does not work with train.old_logprobs sampler (the ratio is against the sampler there,"
    assert message in result.stderr


@pytest.mark.parametrize(
    "plugin",
    [
        TIS(TIS.Options(cap=1.5, low=0.7)),
        IcePop(IcePop.Options(low=0.8, high=1.3)),
        OffPolicyMask(OffPolicyMask.Options(delta=0.05)),
        SequenceTruncate(SequenceTruncate.Options(cap=1.2)),
        *(
            SequenceMask(SequenceMask.Options(statistic=statistic, low=low, high=high, token_weight=weight))
            for statistic, low, high in (("sum", 0.5, 1.5), ("geometric", 0.9, 1.1), ("k3", 0.0, 0.1))
            for weight in ("sequence", "token_truncated", "one")
        ),
    ],
    ids=lambda plugin: f"{type(plugin).__name__}-{getattr(plugin.options, 'statistic', '')}",
)
def test_tokens_whose_sampler_is_unknown_are_in_no_statistic(plugin):
    """Known tokens weigh as they would if the other tokens were not there; these have their row's weight, or 1."""
    batch, current = example()
    unknown = (torch.arange(12) % 4 == 1) & batch.action_mask
    unknown[1] = batch.action_mask[1]
    known = batch.action_mask & ~unknown
    batch.sampler_logprobs = batch.sampler_logprobs.masked_fill(unknown, float("nan"))
    found = weights(plugin, batch, current)
    alone = dataclasses.replace(batch, action_mask=known, loss_mask=known)
    wanted = weights(plugin, alone, current)
    assert torch.equal(found[known], wanted[known])
    assert found.isfinite().all()
    whole = isinstance(plugin, SequenceTruncate) or getattr(plugin.options, "token_weight", "") in ("sequence", "one")
    for row in range(len(batch)):
        mine, theirs = found[row][unknown[row]], found[row][known[row]]
        if whole and known[row].any():
            assert (mine == theirs[0]).all()
        elif isinstance(plugin, TIS | IcePop) or not known[row].any():
            assert (mine == 1).all()
    if isinstance(plugin, TIS | SequenceMask | SequenceTruncate):
        metric = plugin.compute_loss(Outputs(logprobs=current), batch)[-1]
        assert metric.values.isfinite().all()
