"""Optimizers by name: which parameters they step, by what rule, and what they keep."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import rlhf_host
from rlhf_host import UserError
from rlhf_host.backends.one_process import OneProcess
from rlhf_host.backends.optimizers import arguments_of, outside_blocks, state_bytes
from rlhf_host.backends.torch_backend import TorchBackend
from rlhf_host.config.schema import RoleConfig
from rlhf_host.protocols import BackendStart

DATA = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a, b in ((17, 35), (38, 26), (41, 29), (56, 17))]


def right(completions, label, **_):
    return [float(text.strip() == want) for text, want in zip(completions, label, strict=True)]


@pytest.fixture
def model(tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model)


def backend(model, name, *arguments, **settings):
    role = RoleConfig(**{"lr": 1e-2, "max_grad_norm": 0.0, **settings})
    start = BackendStart(model=model, compute=model, head=(), role=role, total_updates=9, ranks=OneProcess())
    return TorchBackend(start, name, arguments)


def give(model, seed=0):
    random = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=random)


def orthogonal(gradient, steps=5):
    """Newton and Schulz's iteration, in float64 (https://kellerjordan.github.io/posts/muon)."""
    a, b, c = 3.4445, -4.775, 2.0315
    x = gradient.double() / (gradient.double().norm() + 1e-7)
    wide = x.T if x.shape[0] > x.shape[1] else x
    for _ in range(steps):
        square = wide @ wide.T
        wide = a * wide + (b * square + c * square @ square) @ wide
    return wide.T if x.shape[0] > x.shape[1] else wide


def test_arguments_may_be_written_as_in_python():
    read = arguments_of(["nesterov=False", "amsgrad=True", "foreach=None", "fused=false", "momentum=0.9", "name=none"])
    assert read == {"nesterov": False, "amsgrad": True, "foreach": None, "fused": False, "momentum": 0.9, "name": "none"}


def test_muon_steps_matrices_of_blocks_and_adamw_all_others(model):
    before, other = copy.deepcopy(model.state_dict()), copy.deepcopy(model)
    made, plain = backend(model, "Muon"), backend(other, "AdamW")
    outside = {name for name, weight in model.named_parameters() if weight in outside_blocks(model)}
    assert any("embed" in name for name in outside)
    assert not any(".layers." in name for name in outside)
    give(model)
    give(other)
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    made.step()
    plain.step()
    for name, weight in model.named_parameters():
        if weight.dim() != 2 or name in outside:
            assert torch.equal(weight, other.get_parameter(name)), name
            continue
        # The first step: momentum 0.95, Nesterov's; scaled to the size of a step of AdamW.
        step = orthogonal(0.05 * gradients[name] + 0.95 * 0.05 * gradients[name])
        expected = -1e-2 * 0.2 * max(weight.shape) ** 0.5 * step
        error = (weight.double() - before[name].double() - expected).norm() / expected.norm()
        assert error < 0.02, (name, float(error))  # torch iterates in bfloat16


@pytest.mark.parametrize(("name", "kept"), [("AdamW", 8), ("SGD", 0), ("Muon", 4), ("Adagrad", 4), ("Adafactor", 0)])
def test_what_an_optimizer_keeps_is_measured(name, kept):
    assert state_bytes(name, {}) == pytest.approx(kept, abs=0.1)
    if name == "SGD":
        assert state_bytes(name, {"momentum": 0.9}) == 4


def test_arguments_of_another_form_than_the_roles_are_the_optimizers_own(model):
    pytest.importorskip("bitsandbytes")
    assert backend(model, "AdEMAMix", "betas=[0.8,0.9,0.95]").optimizer.param_groups[0]["betas"] == (0.8, 0.9, 0.95)
    assert backend(model, "Adafactor", "eps=[null,0.01]").optimizer.param_groups[0]["eps"] == (None, 0.01)


def test_eight_bits_keep_a_quarter(model):
    pytest.importorskip("bitsandbytes")
    assert state_bytes("AdamW8bit", {}) == pytest.approx(2, abs=0.3)
    made = backend(model, "AdamW8bit", betas=(0.9, 0.99))
    assert made.optimizer.param_groups[0]["betas"] == (0.9, 0.99)
    give(model)
    before = copy.deepcopy(model.state_dict())
    assert made.step().applied
    assert not torch.equal(model.lm_head.weight, before["lm_head.weight"])


@pytest.mark.parametrize("name", ["Muon", "SGD", "AdamW8bit", "RMSprop", "Lion"])
def test_a_checkpoint_goes_on_as_if_it_had_not_been_written(model, tmp_path, name):
    if name in ("AdamW8bit", "Lion"):
        pytest.importorskip("bitsandbytes")
    arguments = ("momentum=0.9",) if name == "SGD" else ()
    whole = copy.deepcopy(model)
    one, two = backend(whole, name, *arguments), backend(model, name, *arguments)
    for seed in range(3):
        give(whole, seed)
        one.step()
        if seed == 2:
            two = backend(model, name, *arguments)
            two.load(tmp_path)
        give(model, seed)
        two.step()
        if seed == 1:
            two.save(tmp_path)()
    for key, value in model.state_dict().items():
        assert torch.equal(value, whole.state_dict()[key]), key


def test_the_state_of_another_optimizer_is_refused(model, tmp_path):
    made = backend(model, "AdamW")
    give(model)
    made.step()
    made.save(tmp_path)()
    with pytest.raises(UserError, match="is of another optimizer"):
        backend(model, "Muon").load(tmp_path)


def train(run, **more):
    fixed = {"train.threads": 1, "actor.model": "quickstart", "rollout.max_new_tokens": 4, "n": 8, "batch_size": 8, "steps": 3}
    rlhf_host.train(algo="rloo", reward=right, data=DATA, run_dir=str(run), **{**fixed, "lr": 1e-3, **more})
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_with_muon_resumes_as_if_it_had_not_stopped(tmp_path):
    options = {"backend": {"name": "torch", "optimizer": "Muon", "optimizer_args": ["ns_steps=4"]}}
    train(tmp_path / "whole", **options)
    train(tmp_path / "run", steps=2, **options)
    rlhf_host.train(resume=str(tmp_path / "run"), reward=right, data=DATA, steps=3)
    one, two = (load_file(tmp_path / name / "model/model.safetensors") for name in ("whole", "run"))
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize(
    ("options", "more", "said"),
    [
        ({"optimizer": "Adamw"}, {}, "optimizer Adamw: neither torch.optim nor bitsandbytes.optim has one of this name.*AdamW"),
        ({"optimizer": "LBFGS"}, {}, "LBFGS cannot be used here"),
        ({"optimizer": "SGD", "optimizer_args": ["momentun=0.9"]}, {}, "optimizer_args momentun: SGD takes momentum"),
        ({"optimizer": "SGD", "optimizer_args": ["lr=0.9"]}, {}, "optimizer_args lr: SGD takes momentum"),
        ({"optimizer": "SGD", "optimizer_args": ["momentum"]}, {}, "write KEY=VALUE, such as momentum=0.9"),
        (
            {"optimizer": "SGD", "optimizer_args": ["momentum=0.9", "momentum=0.8"]},
            {},
            "backend.optimizer_args 'momentum=0.8': momentum is given twice",
        ),
        ({"optimizer": "SGD"}, {"actor.betas": [0.8, 0.9]}, "betas is set, and backend.optimizer SGD has no betas"),
        (
            {"optimizer": "AdEMAMix"},
            {"actor.betas": [0.8, 0.9]},
            r"betas of backend.optimizer AdEMAMix is of another form: .*optimizer_args betas=\[0.9, 0.999, 0.9999\]",
        ),
        ({"optimizer": "Adafactor"}, {"actor.adam_eps": 1e-6}, r"another form: .*optimizer_args eps=\[null, 0.001\]"),
        ({"optimizer": "AdamW", "optimizer_args": ["betas=[0.5,0.6]"]}, {}, "optimizer_args betas: AdamW takes"),
    ],
)
def test_what_an_optimizer_does_not_have_is_refused_before_the_run(tmp_path, options, more, said):
    pytest.importorskip("bitsandbytes")
    with pytest.raises(UserError, match=said):
        train(tmp_path / "run", backend={"name": "torch", **options}, **more)
    assert not (tmp_path / "run").exists()
