"""What a step of the backends does with a gradient, by hand: no model, no other process."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rlhf_host.backends.one_process import OneProcess
from rlhf_host.backends.torch_backend import TorchBackend, learning_rate
from rlhf_host.config.schema import RoleConfig
from rlhf_host.distributed.deepspeed.backend import DeepSpeedBackend
from rlhf_host.distributed.split.parking import Parking
from rlhf_host.protocols import BackendStart


class Other(OneProcess):
    """This rank of two; the other has the same gradients times ``times``."""

    def __init__(self, times: float):
        super().__init__()
        self.size = self.processes = 2
        self.times = times

    def sum_(self, tensors):
        for tensor in tensors:
            tensor += (tensor * self.times).to(tensor.dtype)


class Layer(nn.Module):
    """A map with a bias, and a norm's weights: all ones."""

    def __init__(self):
        super().__init__()
        self.map, self.norm = nn.Linear(2, 2), nn.LayerNorm(2)
        for parameter in self.parameters():
            nn.init.ones_(parameter)


def backend(model, ranks=None, total_updates=8, **settings):
    role = RoleConfig(**{"lr": 0.5, "max_grad_norm": 0.0, **settings})
    start = BackendStart(
        model=model, compute=model, head=(), role=role, total_updates=total_updates, ranks=ranks or OneProcess()
    )
    return TorchBackend(start)


def rounded(model):
    """Gives the model weights in 16 bits, with masters."""
    for weight in model.parameters():
        weight.master = nn.Parameter(weight.data)
        weight.data = weight.data.bfloat16()
    return model


def give(model, value):
    """A gradient for every parameter."""
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)


def test_only_maps_decay_and_neither_norms_nor_biases():
    model = Layer()
    made = backend(model, weight_decay=0.5)
    give(model, 0.0)
    made.step()
    assert model.map.weight.tolist() == [[0.75, 0.75]] * 2, "1 - lr * weight_decay"
    for vector in (model.map.bias, model.norm.weight, model.norm.bias):
        assert vector.tolist() == [1.0, 1.0]


def test_a_step_is_adam_s_with_the_role_s_betas():
    """Two steps of different gradients, by the definition (arXiv:1412.6980, algorithm 1)."""
    weight = nn.Parameter(torch.zeros(1, 1, dtype=torch.float64))
    model = nn.ParameterList([weight])
    made = backend(model, betas=(0.5, 0.75), adam_eps=0.125)
    m = v = expected = 0.0
    for step, gradient in enumerate((2.0, -6.0), start=1):
        weight.grad = torch.full_like(weight, gradient)
        made.step()
        m, v = 0.5 * m + 0.5 * gradient, 0.75 * v + 0.25 * gradient**2
        expected -= 0.5 * (m / (1 - 0.5**step)) / ((v / (1 - 0.75**step)) ** 0.5 + 0.125)
    assert weight.item() == pytest.approx(expected)


def test_gradients_are_summed_over_ranks_and_the_sum_is_clipped():
    model = nn.ParameterList([nn.Parameter(torch.zeros(1, 4))])
    made = backend(model, Other(times=3.0), max_grad_norm=1.0)
    seen = []
    made.optimizer.register_step_pre_hook(lambda *_: seen.append(model[0].grad.clone()))
    give(model, 1.0)
    assert made.step().grad_norm == pytest.approx(8.0), "of 4 everywhere, before clipping"
    assert float(seen[0].norm()) == pytest.approx(1.0, abs=1e-5)


def test_nothing_of_a_step_is_left_for_the_next():
    model = Layer()
    made = backend(model)
    give(model, 1.0)
    assert made.step().applied
    assert all(parameter.grad is None for parameter in model.parameters())
    give(model, float("nan"))
    before = [parameter.clone() for parameter in model.parameters()]
    assert not made.step().applied
    assert all(map(torch.equal, before, model.parameters()))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert made.updates == 1, "the schedule stays where it is"


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.25, 0.5, 0.75, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]),
        ("cosine", [0.25, 0.5, 0.75, 1.0, 1.0, 0.8828, 0.6, 0.3172, 0.2, 0.2]),
    ],
)
def test_every_update_has_its_rate(schedule, expected):
    """Four updates of warm-up, which reach the peak; then down to the floor when the run is over."""
    role = RoleConfig(lr=1.0, schedule=schedule, warmup_steps=4, min_lr_ratio=0.2)
    assert [learning_rate(role, update, 8, 1.0) for update in range(10)] == pytest.approx(expected, abs=1e-4)
    model = nn.ParameterList([nn.Parameter(torch.zeros(1, 1))])
    made = backend(model, schedule=schedule, warmup_steps=4, min_lr_ratio=0.2, lr=1.0)
    rates = []
    for _ in range(6):
        give(model, 1.0)
        rates.append((made.step().lr, made.optimizer.param_groups[0]["lr"]))
    assert rates == [(pytest.approx(rate, abs=1e-4), pytest.approx(rate, abs=1e-4)) for rate in expected[:6]]


class Engine:
    """What DeepSpeed's engine is told."""

    def __init__(self):
        self.losses, self.boundaries, self.rates = [], [], []
        self.optimizer = SimpleNamespace(param_groups=[{"lr": 0.0}])

    def set_gradient_accumulation_boundary(self, last):
        self.boundaries.append(last)

    def backward(self, loss, scale_wrt_gas):
        assert not scale_wrt_gas
        self.losses.append(float(loss))

    def step(self):
        self.rates.append(self.optimizer.param_groups[0]["lr"])

    def get_global_grad_norm(self):
        return 1.0

    def was_step_applied(self):
        return True


@pytest.fixture
def deepspeed():
    made = object.__new__(DeepSpeedBackend)
    made.engine, made.ranks = Engine(), Other(times=1.0)
    made.role, made.total_updates, made.lr, made.updates = RoleConfig(lr=1.0, warmup_steps=4), 8, 1.0, 0
    made.options, made.parameters, made._parking = SimpleNamespace(zero_stage=2), [], Parking(torch.device("cpu"))
    return made


def test_deepspeed_which_averages_over_ranks_gets_each_loss_times_their_number(deepspeed):
    """Losses are shares of the whole batch's: what is wanted is their sum."""
    deepspeed.backward(torch.tensor(3.0), last=False)
    deepspeed.backward(torch.tensor(5.0), last=True)
    assert deepspeed.engine.losses == [6.0, 10.0]
    assert deepspeed.engine.boundaries == [False, True], "only the last micro-batch ends the accumulation"


def test_deepspeed_s_optimizer_has_the_rate_of_each_update(deepspeed):
    steps = [deepspeed.step() for _ in range(5)]
    assert deepspeed.engine.rates == [step.lr for step in steps] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_deepspeed_s_optimizer_decays_maps_alone(deepspeed):
    model = Layer()
    deepspeed.parameters, deepspeed.device = list(model.parameters()), torch.device("cpu")
    deepspeed.role = RoleConfig(lr=1.0, weight_decay=0.5, betas=(0.5, 0.75), adam_eps=0.125)
    deepspeed.options = SimpleNamespace(optimizer="torch", offload_optimizer="none")
    maps, vectors = deepspeed._optimizer(None).param_groups
    assert [tuple(parameter.shape) for parameter in maps["params"]] == [(2, 2)]
    assert (len(vectors["params"]), maps["weight_decay"], vectors["weight_decay"]) == (3, 0.5, 0.0)
    assert (maps["betas"], maps["eps"], maps["lr"]) == ((0.5, 0.75), 0.125, 1.0)


def test_a_master_keeps_steps_that_its_weight_in_16_bits_does_not_hold():
    """By hand: after 200 steps of 1e-6 the master has moved by 2e-4, a tenth of what bfloat16 can tell from 1."""
    model = rounded(Layer())
    made = backend(model, lr=1e-6, weight_decay=0.0)
    for _ in range(200):
        made.backward(sum(weight.float().sum() for weight in model.parameters()))
        assert all(weight.grad is None for weight in model.parameters())
        made.step()
    assert model.map.weight.dtype == torch.bfloat16
    assert model.map.weight.unique().tolist() == [1.0]
    assert model.map.weight.master.dtype == torch.float32
    assert model.map.weight.master.unique().tolist() == pytest.approx([1 - 2e-4], abs=4e-6)
    made.role.lr, made.lr = 1e-2, 1e-2
    made.backward(sum(weight.float().sum() for weight in model.parameters()))
    made.step()
    assert model.map.weight.unique().tolist() == [0.98828125], "the master, 0.9898, rounded"


def test_gradients_in_16_bits_are_added_in_32():
    """By hand: 256 and five times 0.5, of which bfloat16 would keep 256."""
    model = rounded(Layer())
    made = backend(model, ranks=Other(1.0))
    for factor in (256.0, *5 * [0.5]):
        made.backward(factor * model.norm.weight.sum())
    assert model.norm.weight.master.grad.tolist() == [258.5] * 2
    assert made.step().grad_norm == pytest.approx(2 * 258.5 * 2**0.5)
    assert model.norm.weight.master.grad is None
    made.backward(model.norm.weight.sum())
    made.discard()
    assert model.norm.weight.master.grad is None
