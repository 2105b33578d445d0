"""One optimizer batch has one gradient: whatever the micro-batches, their order, the padding and what lies in masked places."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rlhf_authoring.tensors import make_batch
from rlhf_plugin_off_policy import TIS
from transformers import AutoModelForCausalLM

from rlhf_host import Batch, CorrectionNeeds, LossTerm, Metric, Needs, Output, RoleNeed, hookimpl
from rlhf_host import functional as F
from rlhf_host.backends.one_process import OneProcess
from rlhf_host.backends.torch_backend import TorchBackend, learning_rate
from rlhf_host.config.schema import RoleConfig, TrainConfig
from rlhf_host.errors import RunError
from rlhf_host.models.passes import Passes
from rlhf_host.plugins.discovery import PluginInfo
from rlhf_host.plugins.manager import Loaded, PluginManager
from rlhf_host.protocols import BackendStart, BackendTraits
from rlhf_host.training import corrections
from rlhf_host.training.batching import plan_microbatches
from rlhf_host.training.role import Role
from rlhf_host.training.worker import Worker

AGGREGATIONS = ["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum-over(12)", "group-mean-token-mean"]


class Policy:
    """The shared policy loss, as any algorithm uses it."""

    def __init__(self, **options):
        self.options = F.PolicyLossOptions(**options)

    @hookimpl
    def needs(self):
        return Needs(data="prompts", roles=(RoleNeed("actor", trainable=True, source=None),))

    @hookimpl
    def compute_loss(self, role, outputs, batch):
        return F.policy_loss(outputs, batch, self.options)


class Weights:
    """A correction that depends on the row alone."""

    @hookimpl
    def importance_weights(self, logprobs, batch):
        return torch.where(batch.action_mask, (logprobs.old - logprobs.sampler).exp().clamp(max=1.5), 1.0)


def manager(*plugins):
    info = PluginInfo("extension", "made_up", "made-up", "1", ">=1", "ok", "", "m:X", "")
    return PluginManager([Loaded("extension", f"p{i}", info, plugin) for i, plugin in enumerate(plugins)])


def batch(mode="fused", seed=1):
    found = make_batch([9, 4, 7, 1, 12, 5, 6, 2], groups=[0, 0, 0, 1, 1, 2, 2, 2], observations=True, vocabulary=40, seed=seed)
    found.advantages = torch.randn(found.action_mask.shape, generator=torch.Generator().manual_seed(2))
    found.shaped = torch.zeros_like(found.advantages)
    found.loss_mask[3] = False
    if mode != "fused":
        found.old_logprobs = found.sampler_logprobs * 0.9
    return found


def worker_for(model, hooks, settings=None, *, backend=TorchBackend, traits=None, needs=None):
    settings = settings or TrainConfig()
    plugin = SimpleNamespace(traits=traits or BackendTraits(), start=backend)
    role = Role.of("actor", model, settings, backend=plugin, settings=RoleConfig(lr=1e-3), total_updates=1, ranks=OneProcess())
    return Worker({"actor": role}, hooks, settings, needs or Needs())


def gradient(tiny_model, data, hooks=(), settings=None, **options):
    """The gradient that reaches the optimizer, and the metrics beside it."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    seen = {}

    class Watch(TorchBackend):
        def step(self):
            seen["gradient"] = torch.cat([p.grad.flatten() for p in self.parameters]).clone()
            return super().step()

    worker = worker_for(model, manager(Policy(**options), *hooks), settings, backend=Watch)
    update = worker.update(data)
    assert update.refused is None
    return seen["gradient"], update.metrics.result()


@pytest.mark.parametrize("asked", [False, True])
def test_entropy_is_computed_of_the_actor_and_where_a_plugin_asks(tiny_model, asked):
    """The actor's is a metric of every step; of another language model nobody sees it."""
    seen = {}

    class Looks:
        @hookimpl
        def needs(self):
            return Needs(roles=tuple(RoleNeed(name, trainable=True, source=None) for name in ("actor", "rival")))

        @hookimpl
        def compute_loss(self, role, outputs, batch):
            seen[role] = outputs.entropy
            return [LossTerm("sum", outputs.logprobs)]

    settings, models = TrainConfig(), {name: AutoModelForCausalLM.from_pretrained(tiny_model) for name in ("actor", "rival")}
    start = SimpleNamespace(traits=BackendTraits(), start=TorchBackend)
    chosen: dict[str, Any] = {"backend": start, "settings": RoleConfig(lr=1e-3), "total_updates": 1, "ranks": OneProcess()}
    roles = {name: Role.of(name, model, settings, **chosen) for name, model in models.items()}
    needs = Needs(outputs=(Output("entropy"),) if asked else ())
    update = Worker(roles, manager(Looks()), settings, needs).update(batch())
    assert update.refused is None
    assert seen["actor"] is not None
    assert (seen["rival"] is not None) == asked
    assert "entropy" in update.metrics.result()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_collision_of_a_role_is_the_sum_of_its_squared_probabilities(tiny_model, temperature):
    model, data = AutoModelForCausalLM.from_pretrained(tiny_model), batch()
    data.temperature = temperature
    found = worker_for(model, manager(Policy())).outputs("actor", "collision", data)
    for row, prompt in enumerate(data.prompt_ids):
        ids = data.completion_ids[row][data.completion_mask[row]].tolist()
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
        wanted = (logits.double() / temperature).softmax(-1).square().sum(-1)
        torch.testing.assert_close(found[row][: len(ids)].double(), wanted, rtol=1e-4, atol=1e-6)
        assert not found[row][len(ids) :].any()


def close(found, expected):
    return float((found - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("mode", ["fused", "recompute"])
def test_the_gradient_does_not_depend_on_micro_batches_or_layout(tiny_model, aggregation, mode):
    whole, metrics = gradient(tiny_model, batch(mode), [Weights()], aggregation=aggregation)
    for budget, shared in ((1, "off"), (24, "off"), (24, "on"), (60, "auto"), (10_000, "on")):
        settings = TrainConfig(max_tokens_per_microbatch=budget, shared_prefix=shared)
        split, theirs = gradient(tiny_model, batch(mode), [Weights()], settings, aggregation=aggregation)
        assert close(split, whole), (budget, shared)
        assert theirs == pytest.approx(metrics, rel=1e-4, abs=1e-6)


def test_a_backend_hears_which_micro_batch_is_the_last(tiny_model):
    heard = []

    class Watch(TorchBackend):
        def backward(self, loss, last=True):
            heard.append(last)
            super().backward(loss, last)

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    settings = TrainConfig(max_tokens_per_microbatch=1, shared_prefix="off")
    worker_for(model, manager(Policy()), settings, backend=Watch).update(batch())
    assert heard == [False] * 7 + [True]


def test_weights_of_several_corrections_are_multiplied(tiny_model):
    class Half:
        @hookimpl
        def importance_weights(self, batch):
            mask = batch.action_mask
            return torch.where(mask, 0.5, 1.0)

    once, _ = gradient(tiny_model, batch("recompute"), [Weights()], loss="pg")
    twice, _ = gradient(tiny_model, batch("recompute"), [Weights(), Half()], loss="pg")
    assert close(twice, once / 2)


def test_the_gradient_does_not_depend_on_the_order_of_rows(tiny_model):
    data = batch("recompute")
    whole, _ = gradient(tiny_model, data)
    moved, _ = gradient(tiny_model, data.select([5, 2, 7, 0, 4, 1, 6, 3]))
    assert close(moved, whole)


def test_the_gradient_does_not_depend_on_padding(tiny_model):
    data = batch("recompute")
    wide = dataclasses.replace(data)
    for field in dataclasses.fields(data):
        value = getattr(data, field.name)
        if isinstance(value, torch.Tensor) and value.dim() == 2 and value.shape == data.completion_ids.shape:
            setattr(wide, field.name, torch.nn.functional.pad(value, (0, 5)))
    assert wide.completion_ids.shape[1] == data.completion_ids.shape[1] + 5
    assert close(gradient(tiny_model, wide)[0], gradient(tiny_model, data)[0])


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e30])
def test_garbage_in_masked_places_changes_nothing(tiny_model, garbage):
    expected, metrics = gradient(tiny_model, batch("recompute"), [Weights()])
    dirty = batch("recompute")
    for name in ("advantages", "old_logprobs", "sampler_logprobs", "token_rewards", "shaped"):
        value = getattr(dirty, name)
        setattr(dirty, name, torch.where(dirty.action_mask, value, garbage))
    dirty.advantages[3] = garbage  # the row that is masked out as a whole
    dirty.completion_ids = torch.where(dirty.completion_mask, dirty.completion_ids, 39)
    found, theirs = gradient(tiny_model, dirty, [Weights()])
    assert torch.equal(found, expected)
    assert theirs == pytest.approx(metrics)


def row_logprobs(model, data, i):
    """Of a row's completion, by the whole model in the precision that it has."""
    length, prompt = int(data.completion_mask[i].sum()), data.prompt_ids[i]
    ids = torch.tensor([prompt + data.completion_ids[i, :length].tolist()])
    every = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return every.gather(-1, ids[0, len(prompt) :, None])[:, 0]


def test_the_gradient_is_that_of_autograd_on_the_definition(tiny_model):
    """Token-mean policy gradient, one row at a time through the whole model."""
    data = batch("fused")
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    loss = 0.0
    for i in range(len(data)):
        picked = row_logprobs(model, data, i)
        kept = data.loss_mask[i, : len(picked)]
        loss = loss - (data.advantages[i, : len(picked)] * picked)[kept].sum() / data.loss_mask.sum()
    loss.backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert close(gradient(tiny_model, data)[0], expected)


def moved(tiny_model, scale, seed=3):
    """The model, in 64 bits, with other weights."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(scale * p.std().nan_to_num() * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return model


@pytest.mark.parametrize("decoupled", [False, True])
def test_the_gradient_on_tokens_of_several_versions_is_that_of_the_definition(tiny_model, tmp_path, decoupled):
    """Every token was sampled by one of three versions μ, also within a row. With ``old_logprobs`` sampler the clipped ratio is
    π/μ. With those of the weights before the update (π_prox) and a correction it is the decoupled objective of AReaL,
    ``(π_prox/μ)·min(rA, clip(r)A)`` with ``r = π/π_prox`` (arXiv:2505.24298, eq. 5)."""
    data, eps, cap = batch("recompute"), 0.2, 1.5
    versions = [moved(tiny_model, scale) for scale in (1.2, 0.9, 0.6)]
    proximal, now = versions[-1], moved(tiny_model, 0.0)
    data.versions = torch.randint(3, data.completion_ids.shape, generator=torch.Generator().manual_seed(5)).sort(-1).values
    sampler, prox = torch.zeros(data.completion_ids.shape).double(), torch.zeros(data.completion_ids.shape).double()
    total, clipped, weighed = 0.0, 0, 0
    for i in range(len(data)):
        with torch.no_grad():
            each = [row_logprobs(model, data, i) for model in versions]
            before = row_logprobs(proximal, data, i)
        for t, current in enumerate(row_logprobs(now, data, i)):
            sampler[i, t], prox[i, t] = each[data.versions[i, t]][t], before[t]
            if not data.loss_mask[i, t]:
                continue
            old = prox[i, t] if decoupled else sampler[i, t]
            ratio, advantage = (current - old).exp(), data.advantages[i, t].double()
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - eps, 1 + eps) * advantage)
            weight = (prox[i, t] - sampler[i, t]).exp().clamp(max=cap) if decoupled else 1.0
            total = total - weight * surrogate / data.loss_mask.sum()
            clipped += int(surrogate != ratio * advantage)
            weighed += int(decoupled and weight != 1.0)
    assert clipped
    assert weighed or not decoupled
    total.backward()
    expected = torch.cat([p.grad.flatten() for p in now.parameters()]).float()
    data.sampler_logprobs, data.old_logprobs = sampler.float(), (prox if decoupled else sampler).float()
    hooks = [TIS(TIS.Options(cap=cap))] if decoupled else []
    settings = TrainConfig(old_logprobs="recompute" if decoupled else "sampler", max_tokens_per_microbatch=40)
    assert close(gradient(tiny_model, data, hooks, settings, clip_eps=eps, clip_eps_high=eps)[0], expected)


def test_a_batch_without_loss_terms_makes_no_step(tiny_model):
    class Silent:
        @hookimpl
        def compute_loss(self, role, outputs, batch):
            return [Metric("seen", 1.0)]

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    worker = worker_for(model, manager(Silent()))
    update = worker.update(batch())
    assert worker.roles["actor"].backend.updates == 0
    assert "grad_norm" not in update.metrics.result()


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("where", ["pass", "loss"])
def test_ranks_agree_on_failures_only_where_none_waits_in_a_pass(tiny_model, monkeypatch, where, even):
    """With collective passes (ZeRO), the other ranks of one whose pass failed never come to an agreement."""

    class Failing(Policy):
        @hookimpl
        def compute_loss(self, role, outputs, batch):
            raise MemoryError("out of memory")

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    hooks = manager(Failing() if where == "loss" else Policy())
    worker = worker_for(model, hooks, traits=BackendTraits(even_passes=even))
    if where == "pass":
        monkeypatch.setattr(Passes, "forward", lambda *_, **__: (_ for _ in ()).throw(MemoryError("out of memory")))
    asked = []
    gather = OneProcess.gather
    monkeypatch.setattr(OneProcess, "gather", lambda self, value: (asked.append(value), gather(self, value))[1])
    monkeypatch.setattr(Worker, "_statistics", lambda *_: None)
    with pytest.raises(Exception, match="out of memory"):
        worker.update(batch())
    assert any(isinstance(value, tuple) and len(value) == 5 for value in asked) is (where == "loss" or not even)


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_non_finite_step_does_not_happen(tiny_model, where):
    class Exploding:
        @hookimpl
        def compute_loss(self, role, outputs, batch):
            values = outputs.logprobs * float("inf") if where == "loss" else (outputs.logprobs * 0).abs().sqrt()
            return [LossTerm("bad", values)]

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    before = [p.clone() for p in model.parameters()]
    worker = worker_for(model, manager(Exploding()))
    update = worker.update(batch())
    assert where in update.refused
    assert worker.roles["actor"].backend.updates == 0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_no_grad_logprobs_are_those_of_training(tiny_model):
    """What ``recompute`` computes is what the update sees: the first ratio is 1."""
    data = batch()
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    worker = worker_for(model, manager(Policy()), TrainConfig(max_tokens_per_microbatch=40))
    data.old_logprobs = worker.outputs("actor", "logprobs", data)
    found = worker.update(data).metrics.result()
    assert found["ratio/max_log"] <= 1e-5
    assert found["mismatch/max"] > 0.1, "the made-up sampler is another policy"
    assert worker.update(data, sampled_now=False).metrics.result()["ratio/max_log"] > 1e-4


def test_corrections_in_sampler_mode_only_gate(tiny_model):
    """With the ratio against the sampler, a weight would count twice; its zeros still act."""

    class HalfAndZero:
        @hookimpl
        def importance_weights(self, batch):
            mask = batch.action_mask
            weights = torch.full(mask.shape, 0.5)
            weights[:, 0] = 0.0
            return weights

    class FirstTokenOut:
        @hookimpl
        def importance_weights(self, batch):
            mask = batch.action_mask
            weights = torch.ones(mask.shape)
            weights[:, 0] = 0.0
            return weights

    data = batch("recompute")
    data.old_logprobs = data.sampler_logprobs
    settings = TrainConfig(old_logprobs="sampler")
    gated, _ = gradient(tiny_model, data, [HalfAndZero()], settings)
    assert torch.equal(gated, gradient(tiny_model, data, [FirstTokenOut()], settings)[0])
    assert not torch.allclose(gated, gradient(tiny_model, data, [], settings)[0])


def test_corrections_see_the_old_and_the_current_policy_and_masked_weights_may_be_anything(tiny_model):
    seen = []

    class Both:
        @hookimpl
        def importance_weights(self, logprobs, batch):
            mask = batch.action_mask
            assert not logprobs.current.requires_grad
            assert batch.versions.shape == mask.shape
            assert batch.version == 7
            seen.append((logprobs.old, logprobs.current, logprobs.sampler, mask))
            return torch.where(mask, 2.0, float("nan"))

    data = dataclasses.replace(batch("recompute"), version=7)
    found, metrics = gradient(tiny_model, data, [Both()])
    assert close(found, 2 * gradient(tiny_model, data)[0])
    assert (metrics["correction/mean"], metrics["correction/ess"]) == (2.0, 1.0)
    for old, current, _, mask in seen:
        assert not torch.allclose(old[mask], current[mask], atol=0.1)
    seen.clear()
    gradient(tiny_model, dataclasses.replace(batch("fused"), version=7), [Both()])
    assert all(torch.equal(old, current) for old, current, _, _ in seen)
    seen.clear()
    data.old_logprobs = data.sampler_logprobs
    gradient(tiny_model, data, [Both()], TrainConfig(old_logprobs="sampler"))
    assert all(torch.equal(old, current) and not torch.equal(old, sampler) for old, current, sampler, _ in seen)


@pytest.mark.parametrize("budget", [1, 24, 10_000])
def test_correction_metrics_are_over_tokens_in_the_loss_however_they_are_split(tiny_model, budget):
    class ByLength:
        @hookimpl
        def importance_weights(self, batch):
            mask = batch.action_mask
            return (mask.sum(-1, keepdim=True) / 4.0 * (mask.sum(-1, keepdim=True) > 1)).expand(mask.shape)

    data = batch()
    _, metrics = gradient(tiny_model, data, [ByLength()], TrainConfig(max_tokens_per_microbatch=budget))
    lengths, kept = data.action_mask.sum(-1).tolist(), data.loss_mask.sum(-1).tolist()
    weights = [n / 4 * (n > 1) for n, count in zip(lengths, kept, strict=True) for _ in range(count)]
    assert metrics["correction/mean"] == pytest.approx(sum(weights) / len(weights))
    assert metrics["correction/max"] == max(weights)
    assert metrics["correction/zeroed"] == pytest.approx(weights.count(0) / len(weights))
    assert metrics["correction/ess"] == pytest.approx(sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights)))


def test_weights_of_the_wrong_shape_name_the_plugin(tiny_model):
    class Column:
        @hookimpl
        def importance_weights(self, batch):
            mask = batch.action_mask
            return torch.ones(len(mask), 1)

    with pytest.raises(
        RunError, match=r"extension:p1 gave \[8, 1\] from importance_weights, expected a tensor \[8, 12\] or \[8\]"
    ):
        gradient(tiny_model, batch(), [Column()])


def test_weights_that_are_not_what_was_said_stop_the_run(tiny_model, caplog):
    class Said:
        def __init__(self, weights):
            self.weights = weights

        @hookimpl
        def needs(self):
            return CorrectionNeeds(weights="row")

        @hookimpl
        def importance_weights(self, batch):
            return self.weights(batch.action_mask)

    with pytest.raises(RunError, match=r"extension:p1 gave weights of tokens, \[8, 12\], and its needs say weights='row'"):
        gradient(tiny_model, batch(), [Said(lambda mask: torch.ones(mask.shape))])
    with pytest.raises(RunError, match="extension:p1 gave negative numbers from importance_weights"):
        gradient(tiny_model, batch(), [Said(lambda mask: -torch.ones(len(mask)))])
    corrections._say_what_acts.cache_clear()
    data = batch("recompute")
    data.old_logprobs = data.sampler_logprobs
    gradient(tiny_model, data, [Said(lambda mask: torch.full((len(mask),), 0.5))], TrainConfig(old_logprobs="sampler"))
    assert (
        "extension:p1 gives weights other than 0 and 1, and with train.old_logprobs sampler only those that are 0 act"
        in caplog.text
    )


def test_weights_of_a_row_are_those_of_all_its_tokens(tiny_model):
    class Rows:
        @hookimpl
        def importance_weights(self, batch):
            mask = batch.action_mask
            return torch.where(mask.sum(-1) > 1, mask.sum(-1) / 4.0, float("nan"))  # the row without a token in the loss

    class Tokens:
        @hookimpl
        def importance_weights(self, batch):
            mask = batch.action_mask
            return (mask.sum(-1, keepdim=True) / 4.0).expand(mask.shape)

    found, metrics = gradient(tiny_model, batch(), [Rows(), Weights()])
    expected, theirs = gradient(tiny_model, batch(), [Tokens(), Weights()])
    assert close(found, expected)
    assert metrics == pytest.approx(theirs, rel=1e-5)


class PerRow:
    """A loss of whole rows, as of pairs."""

    @hookimpl
    def compute_loss(self, role, outputs, batch):
        yield LossTerm("row", -(outputs.logprobs * batch.loss_mask).sum(-1), corrected=True)


def test_a_loss_per_row_takes_weights_of_rows(tiny_model):
    class Twice:
        @hookimpl
        def importance_weights(self, batch):
            mask = batch.action_mask
            return torch.full((len(mask),), 2.0)

    plain, weighed = (run_once(tiny_model, hooks) for hooks in ([PerRow()], [PerRow(), Twice()]))
    assert weighed["loss/row"] == pytest.approx(2 * plain["loss/row"])
    assert weighed["correction/mean"] == 2.0


class Uncorrected:
    """A loss that takes weights from a step on."""

    def __init__(self, begin=100):
        self.begin = begin

    @hookimpl
    def compute_loss(self, role, outputs, batch):
        yield LossTerm("plain", -outputs.logprobs, corrected=batch.step >= self.begin)


@pytest.mark.parametrize("loss", [Uncorrected(), PerRow()])
def test_weights_that_no_term_takes_are_said_once(tiny_model, loss, caplog):
    corrections.say_unused.cache_clear()
    worker = worker_for(AutoModelForCausalLM.from_pretrained(tiny_model), manager(loss, Weights()))
    assert [worker.update(batch()).metrics.result()["correction/unused"] for _ in range(2)] == [1.0, 1.0]
    said = "extension:p1: no loss term has taken its weights so far; those with corrected=True do"
    assert len([line for line in caplog.messages if line.startswith(said)]) == 1


def test_weights_are_used_once_a_term_has_taken_them(tiny_model):
    loss, found = Uncorrected(begin=2), []
    worker = worker_for(AutoModelForCausalLM.from_pretrained(tiny_model), manager(loss, Weights()))
    for step in (1, 2, 3):
        loss.begin = 2 if step < 3 else 100
        found.append(worker.update(dataclasses.replace(batch(), step=step)).metrics.result()["correction/unused"])
    assert found == [1.0, 0.0, 0.0]


def test_an_idle_role_takes_no_step_whichever_plugin_has_terms(tiny_model):
    needs = Needs(roles=(RoleNeed("actor", trainable=True, source=None, idle_steps=2),))
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    worker = worker_for(model, manager(Policy(), Uncorrected(), Weights()), needs=needs)
    start = [parameter.clone() for parameter in model.parameters()]
    for step, trains in ((1, False), (2, False), (3, True)):
        update = worker.update(dataclasses.replace(batch(), step=step))
        found = update.metrics.result()
        assert (not torch.equal(start[0], next(model.parameters()))) == trains
        assert {"loss/policy", "loss/plain", "lr", "grad_norm"} & set(found) == (
            {"loss/policy", "loss/plain", "lr", "grad_norm"} if trains else set()
        )
        assert worker.roles["actor"].backend.updates == int(trains)
        assert {"entropy", "clip_fraction", "correction/mean"} <= set(found)
        assert found.get("correction/unused") == (0.0 if trains else None)
    assert all(parameter.grad is None for parameter in model.parameters())


def run_once(tiny_model, hooks):
    worker = worker_for(AutoModelForCausalLM.from_pretrained(tiny_model), manager(*hooks))
    return worker.update(batch()).metrics.result()


def test_a_worker_hook_sees_what_its_own_plugin_prepared_and_no_rewards(tiny_model):
    seen = {}

    class Curious(Policy):
        @hookimpl
        def compute_loss(self, role, outputs, batch):
            seen.setdefault("own", []).append(batch.own["double"])
            seen["type"] = type(batch)
            with pytest.raises(AttributeError, match=r"batch\.rewards stays with the controller: give it in prepare_batch"):
                batch.rewards  # noqa: B018
            return F.policy_loss(outputs, batch, self.options)

    data = batch()
    data.extra = {"p0": {"double": torch.arange(8.0)}, "p1": {"double": torch.zeros(8)}}
    worker = worker_for(
        AutoModelForCausalLM.from_pretrained(tiny_model), manager(Curious()), TrainConfig(max_tokens_per_microbatch=1)
    )
    worker.update(data)
    assert seen["type"] is Batch
    assert sorted(float(part) for part in seen["own"]) == list(range(8))


# --- batching and backend -----------------------------------------------------------------------


def test_micro_batches_keep_the_budget_and_every_row_once():
    lengths = [10, 3, 8, 8, 2, 50, 7, 1]
    units = [[0, 1], [2, 3, 4], [5], [6, 7]]

    def cost(rows):
        return len(rows) * max(lengths[i] for i in rows)

    for budget in (1, 10, 16, 30, 100, 10_000):
        parts = plan_microbatches(units, lengths, budget, cost)
        assert sorted(row for part in parts for row in part) == list(range(8))
        assert all(cost(part) <= budget or len(part) == 1 for part in parts)


def test_rows_that_must_stay_together_are_never_split():
    parts = plan_microbatches([[0, 1], [2, 3]], [5, 5, 5, 5], 12, *[lambda rows: 5 * len(rows)] * 2)
    assert sorted(map(sorted, parts)) == [[0, 1], [2, 3]]
    with pytest.raises(Exception, match=r"raise train\.max_tokens_per_microbatch"):
        plan_microbatches([[0, 1], [2, 3]], [5] * 4, 9, *[lambda rows: 5 * len(rows)] * 2)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.775, 0.55]),
        ("cosine", [0.5, 1.0, 1.0, 0.8682, 0.55]),
    ],
)
def test_schedules_warm_up_and_come_down_to_their_floor(schedule, expected):
    role = RoleConfig(lr=1.0, schedule=schedule, warmup_steps=2, min_lr_ratio=0.1)
    rates = [learning_rate(role, update, 6, 1.0) for update in range(7)]
    assert rates[:5] == pytest.approx(expected, abs=1e-4)
    assert rates[6] == pytest.approx(1.0 if schedule == "constant" else 0.1)


def test_clipping_reports_the_norm_before_it():
    model = torch.nn.Linear(2, 1, bias=False)
    role = RoleConfig(lr=0.0, max_grad_norm=0.5)
    backend = TorchBackend(BackendStart(model=model, compute=model, head=(), role=role, total_updates=1, ranks=OneProcess()))
    backend.backward((model.weight * torch.tensor([[3.0, 4.0]])).sum())
    result = backend.step()
    assert (result.grad_norm, result.applied) == (pytest.approx(5.0), True)


@pytest.mark.parametrize("even", [False, True])
def test_where_memory_ends_the_error_names_the_settings(tiny_model, even, monkeypatch):
    worker = worker_for(AutoModelForCausalLM.from_pretrained(tiny_model), manager(Policy()))
    role = worker.roles["actor"]
    role.traits = BackendTraits(even_passes=even)
    monkeypatch.setattr(role.passes, "forward", lambda **_: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory")))
    text = (
        "actor: out of memory in a pass that recomputes 0 of 2 layers: set --actor.gradient-checkpointing true, or lower"
        " --train.max-tokens-per-microbatch; rlhf train --resume goes on with that"
    )
    with pytest.raises(RunError) as caught:
        worker.update(batch())
    assert str(caught.value) == text
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    role.settings = RoleConfig(gradient_checkpointing="auto")
    role.passes.model.gradient_checkpointing_enable({"use_reentrant": False})
    with pytest.raises(RunError, match=r"recomputes 2 of 2 layers, chosen by auto: lower --train\.max-tokens-per-microbatch; "):
        worker.update(batch())
