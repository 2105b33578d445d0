"""What plugins give to an update is told by the plugin's name where it cannot be used."""

from types import SimpleNamespace

import pytest
import torch

from rlhf_host import Advantages, LossTerm, Metric, Needs, RunError, hookimpl
from rlhf_host.rollouts.experience import joined, reward_metrics
from rlhf_host.testing.tensors import make_batch
from rlhf_host.training.actor_metrics import RESERVED
from rlhf_host.training.rollout_source import add_advantages

from .test_worker import Weights, batch, gradient, manager


def adds(*items):
    """A plugin that gives these beside the policy's loss, ``extension:p1``; a function is given the outputs."""

    class Adds:
        @hookimpl
        def compute_loss(self, outputs):
            return [item(outputs) if callable(item) else item for item in items]

    return [Adds()]


def experience():
    rows = make_batch([2, 3], rewards=[1.0, 2.0])
    rows.trajectories = [SimpleNamespace(metrics={}, advantage=None, final=True) for _ in range(2)]
    return rows


@pytest.mark.parametrize(
    ("item", "message"),
    [
        *((Metric(name, 1.0), rf"extension:p1 has a metric '{name}', which is the host's own") for name in sorted(RESERVED)),
        (Metric("loss/policy", 1.0), "extension:p1 has a metric 'loss/policy', which is the host's own"),
        (Metric("x", "much"), "extension:p1 failed in compute_loss: TypeError"),
        (Metric(3, 1.0), "extension:p1 failed in compute_loss: ValueError: the metric 3 needs a name"),
        (Metric("x", torch.ones(2, 3), torch.ones(2, 3)), r"the metric 'x' needs .*a bool mask of the shape \[2, 3\] or none"),
        (Metric("x", torch.ones(2, 3), torch.ones(2, dtype=torch.bool)), "extension:p1 failed in compute_loss: .* bool mask"),
        (Metric("x", 1.0, reduce="average"), "extension:p1 failed in compute_loss: .* reduce of mean, sum, min, max, ess"),
        (lambda outputs: LossTerm("x", 1.0), r"extension:p1 .*the values of 'x' are a float, not a tensor"),
        (lambda outputs: outputs.logprobs, "extension:p1 gave a Tensor from compute_loss, expected LossTerm or Metric"),
        (lambda outputs: LossTerm("x", outputs.logprobs.detach()), "extension:p1: loss term 'x' has no gradient"),
        (lambda outputs: LossTerm("x", outputs.logprobs[:, :1]), "extension:p1 failed in compute_loss: .*'x' has shape"),
    ],
)
def test_what_an_update_cannot_use_names_the_plugin(tiny_model, item, message):
    with pytest.raises(RunError, match=message):
        gradient(tiny_model, batch(), adds(item))


def test_a_term_of_zeros_needs_no_gradient(tiny_model):
    zeros = adds(lambda outputs: LossTerm("x", torch.zeros_like(outputs.logprobs)))
    found, metrics = gradient(tiny_model, batch(), zeros)
    assert torch.equal(found, gradient(tiny_model, batch())[0])
    assert metrics["loss/x"] == 0.0


def test_every_metric_of_an_update_is_reserved_or_a_plugin_s(tiny_model):
    _, metrics = gradient(tiny_model, batch("recompute"), [Weights()])
    own = {name for name in metrics if not name.startswith("loss/")} - {"clip_fraction", "dual_clip_fraction"}
    assert own == RESERVED


def test_a_metric_with_the_name_of_another_is_refused():
    rows = experience()
    with pytest.raises(RunError, match="there are two metrics 'a': a plugin's metric needs a name of its own"):
        joined({"a": 1.0}, {"b": 1.0, "a": 2.0})
    rows.trajectories[0].metrics["length/mean"] = 7.0
    with pytest.raises(RunError, match="there are two metrics 'length/mean'"):
        reward_metrics(rows)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            lambda mask: Advantages([1.0]),
            "extension:p0: compute_advantages gave advantages of the type list, expected a tensor",
        ),
        (lambda mask: Advantages(mask.float()[:, :1]), r"extension:p0: compute_advantages gave advantages \[2, 1\], expected"),
        (lambda mask: Advantages(mask / 0.0), "extension:p0: compute_advantages gave non-finite advantages"),
        (lambda mask: Advantages(mask.float(), metrics=[Metric("advantages/mean", 1.0)]), "two metrics 'advantages/mean'"),
        (lambda mask: Advantages(mask.float(), metrics=[1.0]), "extension:p0 failed in the metrics of compute_advantages"),
    ],
)
def test_advantages_that_cannot_be_used_name_the_plugin(answer, message):
    class Wrong:
        @hookimpl
        def compute_advantages(self, experience):
            return answer(experience.action_mask)

    with pytest.raises(RunError, match=message):
        add_advantages(experience(), manager(Wrong()), Needs())
