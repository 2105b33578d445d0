"""Dropout at the inputs of adapters: peft's own in passes that train, none in passes that score, the same again after a resume."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from rlhf_authoring.tensors import make_batch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlhf_host import LossTerm, Needs, RoleNeed, hookimpl
from rlhf_host.backends.one_process import OneProcess
from rlhf_host.backends.torch_backend import TorchBackend
from rlhf_host.config.schema import LoraOptions, RoleConfig, RunConfig, TrainConfig
from rlhf_host.distributed.split.ranks import Ranks
from rlhf_host.engines.plain_path import PlainKernels
from rlhf_host.functional import twin
from rlhf_host.models.adapter_dropout import AdapterDropout, drawing, dropping
from rlhf_host.models.adapters import adapter_layers
from rlhf_host.models.loading import load_model, save_model
from rlhf_host.models.passes import Passes
from rlhf_host.plugins.discovery import PluginInfo
from rlhf_host.plugins.manager import Loaded, PluginManager
from rlhf_host.protocols import BackendTraits
from rlhf_host.training.role import Role
from rlhf_host.training.worker import Worker

peft = pytest.importorskip("peft")

P = 0.25
NEEDS = Needs(data="prompts", roles=(RoleNeed("actor", trainable=True, source=None),))


class Likelihood:
    """The negative log-likelihood of all tokens."""

    @hookimpl
    def needs(self):
        return NEEDS

    @hookimpl
    def compute_loss(self, role, outputs, batch):
        return [LossTerm("nll", -outputs.logprobs)]


def manager():
    info = PluginInfo("algo", "made_up", "made-up", "1", ">=1", "ok", "", "m:X", "")
    return PluginManager([Loaded("algo", "algo", info, Likelihood())])


def model_of(tiny_model, dropout=P, rank=4, **settings):
    model = load_model(
        RoleConfig(model=str(tiny_model), lora=LoraOptions(rank=rank, dropout=dropout), **settings), trainable=True
    )
    draw = torch.Generator().manual_seed(5)
    for _, layer in adapter_layers(model):
        layer.lora_B["trained"].weight.data.normal_(0, 0.1, generator=draw)
    return model


def rows(lengths=(6, 6, 6), step=1):
    batch = make_batch(list(lengths), groups=[*range(len(lengths))], vocabulary=40, seed=1)
    batch.prompt_ids = [[5, 6, 7 + row] for row in range(len(lengths))]
    batch.advantages, batch.step = torch.zeros(batch.action_mask.shape), step
    return batch


def worker_for(model, *, seed=3, ranks=None, settings=None, kernels=None):
    """A worker that makes no steps, so that its updates differ by their masks alone, and the gradients of its updates."""
    gradients = []

    class Watch(TorchBackend):
        def step(self):
            gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
            self.discard()
            return SimpleNamespace(grad_norm=1.0, lr=0.0, applied=True)

    ranks, settings = ranks or OneProcess(), settings or TrainConfig(shared_prefix="off")
    plugin = SimpleNamespace(traits=BackendTraits(), start=Watch)
    role = Role.of(
        "actor",
        model,
        settings,
        kernels=kernels,
        backend=plugin,
        settings=RoleConfig(lr=1e-3),
        total_updates=9,
        ranks=ranks,
    )
    return Worker({"actor": role}, manager(), settings, NEEDS, ranks, seed=seed), gradients


def gradient(model, batch=None, **settings):
    worker, gradients = worker_for(model, **settings)
    update = worker.update(rows() if batch is None else batch)
    return gradients[0], update.metrics.result()["loss"]


def same(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


def test_loss_and_gradients_are_those_of_peft_in_training_mode(tiny_model, tmp_path):
    model = model_of(tiny_model)
    save_model(model, tmp_path / "adapter")
    batch = rows()
    found, loss = gradient(model, batch)

    assert json.loads((tmp_path / "adapter/adapter_config.json").read_text())["lora_dropout"] == P
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True).train()
    ids = torch.cat([torch.tensor(batch.prompt_ids), batch.completion_ids], 1)
    worker, _ = worker_for(model)
    worker._made = (1, 1)
    with drawing([*worker._seed(worker.roles["actor"]), 0], torch.device("cpu")):
        logits = theirs(input_ids=ids[:, :-1]).logits[:, 2:]
    expected = -logits.log_softmax(-1).gather(-1, batch.completion_ids.unsqueeze(-1)).mean()
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    wanted = {name: weight.grad for name, weight in theirs.named_parameters() if weight.grad is not None}
    assert len(wanted) == len(found) == 28
    for name, own in found.items():
        other = wanted["base_model.model." + name.replace(".trained.", ".default.")]
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-7)
    without, plain = gradient(model_of(tiny_model, dropout=0.0), batch)
    assert abs(plain - loss) > 1e-4
    assert not same(without, found)


def test_scores_have_none(tiny_model):
    model, plain = model_of(tiny_model), model_of(tiny_model, dropout=0.0)
    assert not any(isinstance(module, AdapterDropout) for module in plain.modules())
    batch = rows()
    (worker, _), (other, _) = worker_for(model), worker_for(plain)
    expected = other.outputs("actor", "logprobs", batch)
    assert torch.equal(worker.outputs("actor", "logprobs", batch), expected)
    assert worker.evaluate(batch).result() == other.evaluate(batch).result()
    asked = batch.prompt_ids, batch.completion_ids, batch.completion_mask
    with dropping(model), torch.no_grad():  # as a distribution that a loss compares with
        assert torch.equal(Passes(model, shared_prefix="off").forward(*asked).logprobs, expected)
    with dropping(model) as drops:
        assert drops
        assert not torch.equal(Passes(model, shared_prefix="off").forward(*asked).logprobs, expected)
    model.train()  # as other code may leave it
    assert torch.equal(worker.outputs("actor", "logprobs", batch), expected)
    assert torch.equal(Passes(model, shared_prefix="off").forward(*asked).logprobs, expected)


def test_layers_that_are_computed_again_draw_the_same(tiny_model):
    found, loss = gradient(model_of(tiny_model, gradient_checkpointing=True))
    kept, other = gradient(model_of(tiny_model, gradient_checkpointing=False))
    assert loss == other
    assert same(found, kept)


def test_what_an_update_draws_is_told_by_seed_step_number_and_rank(tiny_model):
    model = model_of(tiny_model)
    worker, gradients = worker_for(model)
    state = torch.get_rng_state()
    for step in (1, 1, 2, 2):
        worker.update(rows(step=step))
    assert torch.equal(torch.get_rng_state(), state)  # plugins draw as ever
    assert all(not same(one, other) for number, one in enumerate(gradients) for other in gradients[:number])
    later, again = worker_for(model)  # as after a resume
    for _ in range(2):
        later.update(rows(step=2))
    assert same(again[0], gradients[2])
    assert same(again[1], gradients[3])
    assert not same(gradient(model, seed=4)[0], gradients[0])

    class Second(Ranks):
        def gather(self, value):
            return [value, value]

    assert not same(gradient(model, ranks=Second(1, 2))[0], gradients[0])
    assert same(gradient(model, ranks=Second(0, 2))[0], gradients[0])


def test_every_micro_batch_draws_its_own(tiny_model):
    """Two equal rows in two micro-batches have different gradients, and without dropout equal ones."""
    settings = TrainConfig(shared_prefix="off", max_tokens_per_microbatch=1)
    batch = rows((6, 6))
    batch.prompt_ids = [[5, 6, 7], [5, 6, 7]]
    batch.completion_ids[1] = batch.completion_ids[0]
    alone = batch.select([0])
    for dropout, equal in ((P, False), (0.0, True)):
        both, _ = gradient(model_of(tiny_model, dropout), batch, settings=settings)
        one, _ = gradient(model_of(tiny_model, dropout), alone, settings=settings)
        close = all(torch.allclose(both[name], one[name], rtol=1e-4, atol=1e-7) for name in one)
        assert close == equal


@pytest.mark.parametrize("shared", ["on", "off"])
def test_in_both_layouts_the_loss_is_near_that_without_where_little_is_dropped(tiny_model, shared):
    batch = rows((6, 6, 6))
    batch.prompt_ids, batch.group_id = [[5, 6, 7, 8, 9, 10]] * 3, torch.zeros(3, dtype=torch.int64)
    settings = TrainConfig(shared_prefix=shared)
    _, plain = gradient(model_of(tiny_model, 0.0), batch, settings=settings)
    spread = {}
    for dropout in (0.01, 0.5):
        model = model_of(tiny_model, dropout)
        losses = [gradient(model, batch, settings=settings, seed=seed)[1] for seed in range(8)]
        spread[dropout] = max(abs(loss - plain) for loss in losses)
    assert 0 < spread[0.01] < spread[0.5] / 2


class Twins(PlainKernels):
    """Kernels that compute by copies of the modules."""

    def module(self, model, use):
        return twin(model)


@pytest.mark.parametrize("kernels", ["rlhf_kernels_cpu", "twins", "none"])
def test_kernels_do_not_pass_it_by(tiny_model, kernels):
    built = Twins() if kernels == "twins" else None
    if kernels == "rlhf_kernels_cpu":
        package = pytest.importorskip(kernels)
        cpu = package.CPUKernels(package.Options())
        built = cpu.choose([(kernels, cpu)], PlainKernels())
    found, _ = gradient(model_of(tiny_model), kernels=built)
    assert not same(found, gradient(model_of(tiny_model, 0.0), kernels=built)[0])
    assert same(found, gradient(model_of(tiny_model))[0])


def test_old_logprobs_are_those_without(tiny_model):
    def mode(dropout, **train):
        roles = {"actor": RoleConfig(lora=LoraOptions(rank=4, dropout=dropout))}
        return RunConfig(roles=roles, train=TrainConfig(**train)).old_logprobs_mode

    assert mode(0.1) == "recompute"
    assert mode(0.0) == "fused"
    assert mode(0.1, old_logprobs="fused") == "fused"


@pytest.fixture
def flags(tiny_model, prompts):
    return [
        *("train", "--algo", "grpo", "--reward", "vowels", "--data", prompts, "--actor.model", tiny_model),
        *("--rollout.n", "4", "--rollout.max-new-tokens", "8", "--train.batch-size", "4", "--train.minibatches", "2"),
        *("--actor.lora.rank", "4", "--actor.lora.dropout", "0.2", "--actor.lr", "1e-2", "--train.steps", "4"),
        *("--checkpoint.every", "2", "--checkpoint.keep", "0"),
    ]


def curve(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    machine = ("time/", "memory/", "engine/", "sync/", "tokens_per_s", "tflops", "mfu")
    return [{key: value for key, value in line.items() if not key.startswith(machine)} for line in lines]


def ok(result):
    assert result.exit_code == 0, result.output


def test_a_resumed_run_is_the_run_that_was_never_stopped(rlhf_here, flags, tmp_path):
    ok(rlhf_here(*flags, "--run-dir", tmp_path / "whole"))
    ok(rlhf_here(*flags, "--train.steps", "2", "--run-dir", tmp_path / "cut"))
    ok(rlhf_here("train", "--resume", tmp_path / "cut", "--train.steps", "4"))
    whole = curve(tmp_path / "whole")
    assert curve(tmp_path / "cut") == whole
    assert max(row["mismatch/max"] for row in whole) < 1e-4  # measured without dropout
    first, second = (load_file(tmp_path / run / "model/adapter_model.safetensors") for run in ("whole", "cut"))
    assert same(first, second)


def test_an_adapter_that_goes_on_has_it_too(rlhf_here, flags, tmp_path):
    short = [*flags, "--train.steps", "1"]
    ok(rlhf_here(*short, "--run-dir", tmp_path / "first"))
    model = tmp_path / "first/model"
    rank = short.index("--actor.lora.rank")
    more = [*short[:rank], *short[rank + 2 :], "--actor.model", model]
    finals = []
    for dropout in ("0.2", "0"):
        run = tmp_path / f"second-{dropout}"
        ok(rlhf_here(*more, "--actor.lora.dropout", dropout, "--run-dir", run))
        assert json.loads((run / "model/adapter_config.json").read_text())["lora_dropout"] == float(dropout)
        finals.append(load_file(run / "model/adapter_model.safetensors"))
    assert not same(*finals)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--actor.lora.rank", "0"], "actor.lora.dropout is 0.2, and the role trains no adapter: add --actor.lora.rank 16"),
        (["--actor.lora.dropout", "1"], "actor.lora.dropout"),
    ],
)
def test_dropout_without_an_adapter_or_of_everything_is_refused(rlhf_here, flags, tmp_path, change, message):
    done = rlhf_here(*flags, *change, "--run-dir", tmp_path / "run")
    assert done.exit_code == 2
    assert message in done.output
    assert "Traceback" not in done.output
    assert not (tmp_path / "run").exists()
