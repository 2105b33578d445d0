"""What plugins give to an update is told by the plugin's name where it cannot be used."""

from types import SimpleNamespace

import pytest
import torch
from rlhf_authoring.tensors import make_batch
from transformers import AutoModelForCausalLM

from rlhf_host import Advantages, LossTerm, Metric, Needs, RunError, hookimpl
from rlhf_host.rollouts.experience import joined
from rlhf_host.training.actor_metrics import RESERVED
from rlhf_host.training.rollout_source import add_advantages

from .test_worker import Policy, Weights, batch, gradient, manager, worker_for


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
        (
            lambda outputs: outputs.logprobs,
            "extension:p1 gave a Tensor in a list from compute_loss, expected a list of LossTerm",
        ),
        (lambda outputs: LossTerm("x", outputs.logprobs.detach()), "extension:p1: loss term 'x' has no gradient"),
        (
            lambda outputs: LossTerm("x", -outputs.values),
            r"extension:p1 .*NoneType.*; no plugin asks for outputs.values: add Output\('values'\) to the outputs of its Needs",
        ),
        (
            lambda outputs: LossTerm("x", outputs.others["teacher"].own),
            r"extension:p1 .*outputs.others has no 'teacher', .*: add Output\('distribution', role='teacher'\) to the outputs of",
        ),
        (
            lambda outputs: LossTerm("x", outputs.logprobs - outputs.entropy),
            r"extension:p1 has a loss of outputs.entropy, .*: add Output\('entropy'\) to the outputs of its Needs",
        ),
        (lambda outputs: LossTerm("x", outputs.logprobs[:, :1]), "extension:p1 failed in compute_loss: .*'x' has shape"),
    ],
)
def test_what_an_update_cannot_use_names_the_plugin(tiny_model, item, message):
    with pytest.raises(RunError, match=message):
        gradient(tiny_model, batch(), adds(item))


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (lambda outputs: outputs.logprobs.sum(), "a Tensor"),
        (lambda outputs: outputs.logprobs, "a Tensor"),
        (lambda outputs: {"loss": outputs.logprobs}, "a dict"),
        (lambda outputs: (outputs.logprobs.sum(), {}), "a Tensor in a tuple"),
        (lambda outputs: LossTerm("x", outputs.logprobs), "a LossTerm"),
        (lambda outputs: outputs.logprobs.detach().numpy(), "a ndarray"),
    ],
)
def test_a_loss_of_another_form_names_plugin_and_hook_and_what_to_give(tiny_model, given, kind):
    class Other:
        @hookimpl
        def compute_loss(self, outputs):
            return given(outputs)

    with pytest.raises(RunError) as error:
        gradient(tiny_model, batch(), [Other()])
    assert str(error.value) == f"extension:p1 gave {kind} from compute_loss, expected a list of LossTerm or Metric or None"


def test_a_loss_that_is_not_a_number_is_said_to_be_whose(tiny_model):
    hooks = manager(Policy(), *adds(lambda outputs: LossTerm("broken", outputs.logprobs * float("nan"))))
    update = worker_for(AutoModelForCausalLM.from_pretrained(tiny_model), hooks).update(batch())
    assert update.refused == "actor: the loss is nan (of extension:p1, 'broken')"


def test_weights_that_are_not_numbers_are_said_to_be_whose(tiny_model):
    class Broken:
        @hookimpl
        def importance_weights(self, logprobs):
            return logprobs.current / 0.0 * 0.0

    with pytest.raises(RunError, match="extension:p1 gave non-finite numbers from importance_weights, at tokens in the loss"):
        gradient(tiny_model, batch(), [Broken(), Weights()])


def test_entropy_that_is_only_measured_needs_no_gradient(tiny_model):
    measured = adds(
        lambda outputs: Metric("spread", outputs.entropy),
        lambda outputs: LossTerm("x", outputs.logprobs - 0.0 * outputs.entropy),
    )
    assert gradient(tiny_model, batch(), measured)[1]["spread"] > 0


def test_log_probabilities_of_a_role_that_nobody_asked_for():
    with pytest.raises(KeyError, match=r"batch.logprobs has no 'reference', .* Output\('logprobs', role='reference'\)"):
        experience().select([0]).logprobs["reference"]


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
    with pytest.raises(RunError, match="there are two metrics 'a': a plugin's metric needs a name of its own"):
        joined({"a": 1.0}, {"b": 1.0, "a": 2.0})


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
