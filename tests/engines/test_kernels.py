"""Kernels that a run tries, who chooses among them, and what happens when kernels fail after that."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from rlhf_host.backends.one_process import OneProcess
from rlhf_host.config.defaults import kernels_to_try
from rlhf_host.config.schema import PluginChoice
from rlhf_host.engines.plain_path import PlainKernels
from rlhf_host.errors import PluginError, RunError
from rlhf_host.functional import twin
from rlhf_host.models.logprobs import token_logprobs
from rlhf_host.models.passes import Passes
from rlhf_host.runtimes.building import chosen_kernels


class Kernels(PlainKernels):
    """Twins whose last norm is what ``wrong`` says, which nobody compares with the model."""

    def __init__(self, wrong: float = 1.0):
        super().__init__()
        self.wrong = wrong

    def module(self, model, use):
        self.twin = twin(model)
        self.twin.model.norm = Scaled(self.twin.model.norm, self)
        return self.twin


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


def test_passes_compute_with_the_twin_and_leave_the_model_as_it_was(model):
    before = {name: type(part) for name, part in model.named_modules()}
    weights = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    kernels = Kernels()
    passes = Passes(model, kernels=kernels)
    torch.testing.assert_close(passes.forward(*ROWS).logprobs, Passes(model).forward(*ROWS).logprobs)
    assert passes.compute is kernels.twin
    assert {name: type(part) for name, part in model.named_modules()} == before
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == weights


def test_passes_compare_layouts_whoever_chose_the_twin(model):
    passes = Passes(model, kernels=Kernels(1.01))
    with pytest.warns(UserWarning, match="the kernels' LlamaForCausalLM gives other results in the padded layout"):
        logprobs = passes.forward(*ROWS).logprobs
    assert torch.equal(logprobs, Passes(model).forward(*ROWS).logprobs)


def test_kernels_that_fail_after_their_trial_end_the_run_with_the_way_on(model):
    right = Kernels()
    passes = Passes(model, kernels=right)
    passes.forward(*ROWS)
    right.wrong = 0
    with pytest.raises(RunError, match=r"failed in a pass .*no such tile; continue without them: .*--kernels none"):
        passes.forward(*ROWS)


def test_passes_compute_log_probabilities_with_the_kernels_function_also_in_a_backend(model):
    """A backend that computes in 16 bits takes the head's autocast away, and keeps the function."""
    calls = []

    class Heads(PlainKernels):
        def token_logprobs(self, use):
            return lambda *arguments, **settings: (calls.append(use), token_logprobs(*arguments, **settings))[1]

    passes = Passes(model, kernels=Heads())
    assert torch.equal(passes.forward(*ROWS).logprobs, Passes(model).forward(*ROWS).logprobs)
    assert [use.purpose for use in calls] == ["train"]
    passes.go_through(
        SimpleNamespace(exact=False, run_pass=lambda run: run(), run_head=lambda run, *at: run(*at)), OneProcess()
    )
    passes.forward(*ROWS)
    assert len(calls) == 2


class Spec:
    """Kernels whose ``choose`` returns all names that it was given."""

    def __init__(self, name, error=None):
        self.name, self.error = name, error

    def build(self):
        return self

    def choose(self, candidates, plain):
        if self.error is not None:
            raise self.error
        return [name for name, _ in candidates], type(plain), self.name


def test_the_first_chooses_among_all_and_without_any_the_plain_path_computes():
    assert chosen_kernels([Spec("a"), Spec("b")]) == (["a", "b"], PlainKernels, "a")
    assert type(chosen_kernels([])) is PlainKernels
    with pytest.raises(RunError, match="kernels a failed in choose: LookupError: no tiles"):
        chosen_kernels([Spec("a", LookupError("no tiles"))])


def test_auto_takes_those_that_are_installed_with_their_libraries(monkeypatch):
    monkeypatch.setattr("rlhf_host.plugins.libraries._is_there", lambda library: library not in ("liger_kernel", "triton"))
    assert [spec.name for spec in kernels_to_try(PluginChoice(name="auto"))] == ["cpu", "graphs"]
    assert [spec.name for spec in kernels_to_try(PluginChoice(name="compile"))] == ["compile"], "only by its name"
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
