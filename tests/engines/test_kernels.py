"""Which kernels a run tries, what a trial refuses, and what happens when kernels fail after it."""

from __future__ import annotations

import copy
import json
import logging

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from rlhf_host.config.defaults import kernels_to_try
from rlhf_host.config.schema import PluginChoice
from rlhf_host.engines.decoding import PlainDecoder
from rlhf_host.engines.kernels import TriedKernels
from rlhf_host.errors import PluginError, RunError
from rlhf_host.functional import twin
from rlhf_host.models.heads import find_head
from rlhf_host.models.passes import Passes
from rlhf_host.protocols import Traits, Use


class Kernels:
    """A twin whose last norm is what ``wrong`` says."""

    traits = Traits()

    def __init__(self, wrong: float = 1.0, unsuited: str | None = None):
        self.wrong, self.why_not, self.twins = wrong, unsuited, []

    def unsuited(self, model, use):
        return self.why_not

    def twin(self, model, use):
        made = twin(model)
        made.model.norm = Scaled(made.model.norm, self)
        self.twins.append(made)
        return made


class Scaled(nn.Module):
    def __init__(self, norm: nn.Module, kernels: Kernels):
        super().__init__()
        self.norm, self.kernels = norm, kernels

    def forward(self, hidden):
        if self.kernels.wrong == 0:
            raise ValueError("no such tile")
        return self.norm(hidden) * self.kernels.wrong


ROWS = ([[3, 4, 5], [3, 4, 5]], torch.tensor([[6, 7], [8, 9]]), torch.ones(2, 2, dtype=torch.bool), torch.zeros(2))


@pytest.fixture
def model(tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model).eval()


def test_the_first_that_suits_and_passes_the_trial_computes(model, caplog):
    caplog.set_level(logging.INFO)
    unfit, wrong, right, last = Kernels(unsuited="too small"), Kernels(1.01), Kernels(), Kernels()
    kernels = TriedKernels([("unfit", unfit), ("wrong", wrong), ("right", right), ("last", last)])
    passes = Passes(model, kernels=kernels)
    assert passes.compute is right.twins[0]
    assert (unfit.twins, last.twins) == ([], [])
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3, "whoever runs it sees what computes"
    assert kernels.reports[0] == "kernels 'unfit' are not used to train LlamaForCausalLM: too small"
    assert "'wrong' are not used to train LlamaForCausalLM: " in kernels.reports[1]
    assert kernels.reports[2] == "kernels 'right' are used to train LlamaForCausalLM"
    plain = Passes(model).forward(*ROWS).logprobs
    torch.testing.assert_close(passes.forward(*ROWS).logprobs, plain)


def test_the_users_model_is_as_it_was(model):
    before = {name: type(part) for name, part in model.named_modules()}
    weights = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    Passes(model, kernels=TriedKernels([("right", Kernels())])).forward(*ROWS)
    assert {name: type(part) for name, part in model.named_modules()} == before
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == weights


def _broken(error):
    def method(model, use):
        raise error

    return method


@pytest.mark.parametrize("method", ["unsuited", "twin"])
def test_kernels_that_raise_are_left_out(model, method):
    broken, right = Kernels(), Kernels()
    setattr(broken, method, _broken(ImportError("no module named 'tiles'")))
    kernels = TriedKernels([("broken", broken), ("right", right)])
    assert Passes(model, kernels=kernels).compute is right.twins[0]
    assert "'broken' are not used to train LlamaForCausalLM: ImportError: no module named 'tiles'" in kernels.reports[0]


def test_a_model_that_is_not_trained_is_not_said_to_be(model):
    kernels = TriedKernels([("right", Kernels())])
    Passes(model.requires_grad_(False), kernels=kernels)
    assert kernels.reports == ["kernels 'right' are used for log-probabilities of LlamaForCausalLM"]


@pytest.mark.parametrize("beyond", [0, 20])
def test_kernels_with_another_gradient_are_not_used(model, beyond):
    """Of the embedding, which is in no layer, and of rows that are not very short."""

    class Doubling(Kernels):
        def twin(self, model, use):
            made = super().twin(model, use)
            made.model.embed_tokens.register_forward_hook(
                lambda module, args, out: 2 * out - out.detach() if out.shape[1] > beyond else out
            )
            return made

    kernels = TriedKernels([("doubling", Doubling())])
    assert Passes(model, kernels=kernels).compute is model
    assert "the gradient of model.embed_tokens.weight differs by 1, more than 0.0001" in kernels.reports[0]
    assert all(weight.grad is None for weight in model.parameters())


class MixingUp(PlainDecoder):
    def keep(self, rows):
        super().keep(torch.arange(len(rows)))


def _stale(model):
    model = copy.deepcopy(model)
    return PlainDecoder(model, find_head(model))


@pytest.mark.parametrize(
    ("make", "report"),
    [
        (_stale, "not used to sample LlamaForCausalLM: after the weights have changed its logits differ by"),
        (lambda model: MixingUp(model, find_head(model)), "not used to sample LlamaForCausalLM: its logits differ by"),
        (lambda model: PlainDecoder(model, find_head(model)), "used to sample LlamaForCausalLM"),
    ],
    ids=["stale", "mixing rows up", "right"],
)
def test_a_decoder_is_tried_with_rows_that_leave_and_with_other_weights(model, make, report):
    class Sampling(Kernels):
        def twin(self, model, use):
            self.twins.append(make(model))
            return self.twins[-1]

    sampling, weights = Sampling(), copy.deepcopy(model.state_dict())
    kernels = TriedKernels([("sampling", sampling)])
    use = Use(purpose="sample", device=torch.device("cpu"), dtype=torch.float32, autocast=None)
    decoder = kernels.decoder(model, use, 20)
    assert f"kernels 'sampling' are {report}" in kernels.reports[0]
    assert (decoder is sampling.twins[0]) == report.startswith("used")
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


@torch.no_grad()
def _scale_head(model):
    model.lm_head.weight.mul_(3)


@pytest.mark.parametrize(
    "change",
    [
        _scale_head,
        lambda model: setattr(model.model.norm, "forward", lambda hidden: hidden),
        lambda model: setattr(model.config, "_attn_implementation", "eager"),
        lambda model: model.model.register_forward_hook(lambda *_: None),
        lambda model: setattr(model.model, "norm", nn.Identity()),
    ],
    ids=["weights", "forward", "attention", "hook", "module"],
)
def test_kernels_that_change_the_model_end_the_run(model, change):
    class Changing(Kernels):
        def twin(self, model, use):
            change(model)
            return super().twin(model, use)

    with pytest.raises(RunError, match="kernels 'rude' changed the model itself while they were tried to train Llama"):
        Passes(model, kernels=TriedKernels([("rude", Changing())]))


def test_kernels_that_fail_after_their_trial_end_the_run_with_the_way_on(model):
    right = Kernels()
    passes = Passes(model, kernels=TriedKernels([("right", right)]))
    passes.forward(*ROWS)
    right.wrong = 0
    with pytest.raises(RunError, match=r"failed in a pass .*no such tile; continue without them: .*--kernels none"):
        passes.forward(*ROWS)


def test_auto_takes_those_that_are_installed_with_their_libraries(monkeypatch):
    monkeypatch.setattr("rlhf_host.plugins.libraries._is_there", lambda library: library != "liger_kernel")
    assert [spec.name for spec in kernels_to_try(PluginChoice(name="auto"))] == ["cpu"]
    assert kernels_to_try(PluginChoice(name="none")) == []
    with pytest.raises(PluginError, match="kernels 'liger' needs liger_kernel: pip install 'rlhf-kernels-liger"):
        kernels_to_try(PluginChoice(name="liger"))
    with pytest.raises(PluginError, match="no kernels named 'cpus' are installed; did you mean 'cpu'"):
        kernels_to_try(PluginChoice(name="cpus"))


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_options_of_kernels_that_nobody_named_are_refused(rlhf, choice):
    flags = ["train", "--algo", "rloo", "--reward", "math_verifier", "--kernels", choice, "--kernels.window", "8", "--dry-run"]
    message = f"--kernels.window: only kernels chosen by name (--kernels NAME) take options, not '{choice}'"
    assert message in rlhf.run(*flags, code=2).stderr


def test_a_run_learns_the_same_with_kernels_and_names_them(rlhf, small_run, tmp_path):
    flags = [flag for flag in small_run if flag not in ("--kernels", "none")]
    losses = {}
    for name in ("none", "auto"):
        rlhf.run(*flags, "--kernels", name, "--train.steps", "2", "--run-dir", tmp_path / name)
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        losses[name] = [row["grad_norm"] for row in rows if "grad_norm" in row]
    plugins = json.loads((tmp_path / "auto/plugins.json").read_text())
    assert "rlhf-kernels-cpu" in [plugin["distribution"] for plugin in plugins if plugin["kind"] == "kernels"]
    assert losses["auto"] == pytest.approx(losses["none"], rel=1e-3)
