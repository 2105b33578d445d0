"""Recomputed layers and kept logits by memory: the number that fits, its correction, ranks that disagree, and equal numbers."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rlhf_authoring.contracts.reinforce import NEEDS, Reinforce, batch, manager_of
from rlhf_plan import recomputation
from rlhf_plan.footprint import footprint
from rlhf_plan.recomputation import Passing, Plan, free_memory
from transformers import AutoModelForCausalLM, LlamaConfig

from rlhf_host.backends import OneProcess
from rlhf_host.installed import build, find
from rlhf_host.internals import Role, Worker
from rlhf_host.models import load_model
from rlhf_host.settings import RoleConfig, TrainConfig

DEPTH, TOKENS = 4, 64


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=DEPTH,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    directory = tmp_path_factory.mktemp("model")
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return str(directory)


@pytest.fixture(autouse=True, scope="module")
def counted_once():
    """What a pass of the tiny model keeps, which is the same in all tests of this file."""
    known: dict[Any, Any] = {}

    def remembered(model: Any, **settings: Any) -> Any:
        key = tuple(settings.items())
        if key not in known:
            known[key] = footprint(model, **settings)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recomputation, "footprint", remembered)
        yield


def role_of(path: str, layers: Any = "auto", train: TrainConfig | None = None) -> Role:
    settings = RoleConfig(model=path, device="cpu", gradient_checkpointing=layers, lr=1e-2)
    model = load_model(settings, trainable=True)
    plugin: Any = build(find("backend", "torch"), {})
    own = train or TrainConfig(max_tokens_per_microbatch=TOKENS)
    return Role.of("actor", model, own, backend=plugin, settings=settings, total_updates=9, ranks=OneProcess())


def worker_of(role: Role, train: TrainConfig) -> Worker:
    memory = recomputation.memory_plan({"actor": role}, train, OneProcess())
    return Worker({"actor": role}, manager_of(algo=Reinforce()), train, NEEDS, memory=memory)


def passing(role: Role, **train: Any) -> Passing:
    return Passing.of(role, TrainConfig(max_tokens_per_microbatch=TOKENS, **train), OneProcess())


def choose(own: Passing, free: float | None, ranks: Any = None) -> int:
    own._choose(free, ranks or OneProcess())
    return own.role.passes.recomputed[0]


@pytest.mark.parametrize("count", range(DEPTH))
def test_the_first_layers_are_recomputed_as_many_as_memory_asks_for(path, count):
    own = passing(role_of(path))
    needed = own._needed(count, False)
    assert choose(own, needed) == count
    layers = own.role.passes.model.model.layers
    assert [layer.gradient_checkpointing for layer in layers] == [True] * count + [False] * (DEPTH - count)
    if count:
        assert choose(own, needed - 1) == count + 1
        assert own._needed(count - 1, False) - needed > 64 * TOKENS, "a layer that is computed again gives much memory back"


def test_where_nothing_fits_or_is_known_all_are(path):
    assert choose(passing(role_of(path)), 0.0) == DEPTH
    assert choose(passing(role_of(path)), None) == DEPTH
    unknown = passing(role_of(path))
    unknown.memory = None
    assert choose(unknown, 1e12) == DEPTH


def test_ranks_take_the_largest_number_and_keep_logits_only_together(path, caplog):
    own = passing(role_of(path))
    own.logits = True
    ranks = SimpleNamespace(process=0, gather=lambda own: [own, (3, False)])
    with caplog.at_level(logging.WARNING):
        assert choose(own, 1e12, ranks) == 3
    assert own.role.passes.keep_logits is False
    text = "actor recomputes 3 of 4 layers in the backward pass and computes logits twice: a pass of 64 tokens needs "
    assert [record.getMessage()[: len(text)] for record in caplog.records] == [text]


def test_the_first_update_corrects_what_was_computed(path, monkeypatch):
    train = TrainConfig(max_tokens_per_microbatch=TOKENS, shared_prefix="off")
    role = role_of(path, train=train)
    worker = worker_of(role, train)
    memory = iter([1e12, 5e5, 0.0])
    monkeypatch.setattr(recomputation, "free_memory", lambda device: next(memory))
    counts = []
    for _ in range(4):
        metrics = worker.update(batch()).metrics.result()
        counts.append(metrics["recomputed_layers"])
    plan: Any = worker.memory
    own = plan.roles[0]
    assert 0.9 < own.scale < 1.1, "what was computed is close to what is kept"
    assert counts[0] == 0
    assert 0 < counts[1] <= DEPTH
    assert counts[1:] == [counts[1]] * 3, "the third update asks no more"
    assert own._needed(int(counts[1]), False) <= 5e5
    assert role.passes.watched(3).__class__.__name__ == "nullcontext"


def test_an_estimate_that_was_too_low_recomputes_more(path):
    own = passing(role_of(path))
    free = own._needed(0, False)
    with own.update(free, OneProcess()):
        run(own.role)
    assert own.role.passes.recomputed[0] == 0
    own.scale *= 1.5
    assert choose(own, free) > 0


def run(role: Role) -> None:
    ids, mask = torch.ones(2, 8, dtype=torch.int64), torch.ones(2, 8, dtype=torch.bool)
    role.passes.forward([[1, 2], [3, 4]], ids, mask).logprobs.sum().backward()


@pytest.fixture
def gpu(monkeypatch) -> Any:
    """Figures of a GPU that is not there."""
    figures = SimpleNamespace(free=60e9, total=80e9, allocated=10e9, reserved=12e9, peak=10e9)
    figures.forgotten = []

    def forget(device):
        figures.forgotten.append(figures.peak)
        figures.peak = figures.allocated
        return figures.allocated

    monkeypatch.setattr(recomputation, "forget_peak", forget)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (figures.free, figures.total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: figures.reserved)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: figures.allocated)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: figures.peak)
    return figures


def on_gpu(path: str, layers: Any) -> Passing:
    role = role_of(path, layers)
    role.passes.device = torch.device("cuda")
    return passing(role)


def test_memory_of_a_gpu_is_what_nobody_uses_of_its_usable_share(gpu):
    assert free_memory(torch.device("cuda")) == 60e9 + 2e9 - 8e9
    assert free_memory(torch.device("meta")) is None


def test_on_a_gpu_the_peak_of_the_first_update_corrects(path, gpu):
    own = on_gpu(path, "auto")
    assert own.logits
    plan = Plan([own], OneProcess())
    with plan(own.role), own.role.passes.watched(TOKENS):
        gpu.peak = gpu.allocated + own._needed(0, own.role.passes.keep_logits) + own._needed(0, False)
    assert own.role.passes.recomputed[0] == 0
    assert own.scale > 2, "it took far more than was computed"
    twice = own._needed(0, False)
    gpu.free = twice - 1 - 2e9 + 8e9
    with plan(own.role):
        assert own.role.passes.recomputed[0] > 0
    gpu.free = 60e9
    with plan(own.role):
        assert own.role.passes.recomputed[0] > 0, "the third update is as the second"
    assert len(gpu.forgotten) == 1


@pytest.mark.parametrize(("room", "kept"), [(1.0, True), (-1.0, False)])
def test_logits_are_kept_where_they_fit_beside_the_peak(path, gpu, room, kept):
    """Of a role whose layers are a setting nothing is computed: its first update shows what it takes."""
    own = on_gpu(path, False)
    plan = Plan([own], OneProcess())
    assert own.memory is None
    with plan(own.role), own.role.passes.watched(TOKENS // 2):
        assert not own.role.passes.keep_logits
        gpu.peak = gpu.allocated + 1000
    logits = TOKENS * 40 * 4
    gpu.free = 2 * 1000 + logits + room - 2e9 + 8e9
    with plan(own.role):
        assert own.role.passes.keep_logits is kept


def test_memory_that_comes_with_the_first_step_is_set_aside(path, gpu):
    own, other = on_gpu(path, "auto"), on_gpu(path, "auto")
    trained = sum(weight.numel() for weight in own.role.passes.model.parameters())
    assert own.coming == other.coming == 8 * trained
    gpu.free = own._needed(DEPTH - 1, False) + 2 * 8 * trained - 2e9 + 8e9
    plan = Plan([own, other], OneProcess())
    with plan(own.role):
        assert own.role.passes.recomputed[0] == DEPTH - 1
    gpu.free -= 8 * trained
    with plan(other.role):
        assert other.role.passes.recomputed[0] == DEPTH - 1, "the first one has had its step"


@pytest.mark.parametrize("layers", [1, DEPTH, True, "auto"])
@pytest.mark.parametrize("logits", ["off", "on"])
def test_weights_after_steps_are_equal_bit_for_bit(path, layers, logits, monkeypatch):
    monkeypatch.setattr(recomputation, "free_memory", lambda device: 4.5e5)

    def trained(layers: Any, logits: Any) -> dict[str, torch.Tensor]:
        train = TrainConfig(max_tokens_per_microbatch=TOKENS, keep_logits=logits, shared_prefix="off")
        role = role_of(path, layers, train)
        worker = worker_of(role, train)
        for _ in range(3):
            worker.update(batch())
        return role.passes.model.state_dict()

    expected = trained(False, "off")
    found = trained(layers, logits)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
