"""What a step computes around the model, by hand: old log-probabilities, the mismatch with the sampler, minibatches, versions."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rlhf_authoring.tensors import make_batch

from rlhf_host import RunError
from rlhf_host.config.schema import RunConfig
from rlhf_host.protocols import Update
from rlhf_host.records.metric_names import RowMetrics
from rlhf_host.records.needs import Needs, Output
from rlhf_host.records.tensors import Metric, Outputs
from rlhf_host.rollouts.gate import Gate
from rlhf_host.rollouts.summary import pass_at_k
from rlhf_host.training.actor_metrics import actor_metrics
from rlhf_host.training.components import Progress, RunComponents
from rlhf_host.training.loop import Loop
from rlhf_host.training.optimize import optimize
from rlhf_host.training.reduction import Metrics, reduced
from rlhf_host.training.rollout_source import add_outputs, staleness
from rlhf_host.training.source import Drawn


class Trainer:
    """Says of every role its own log-probabilities, and writes down who was asked."""

    compute_s = 0.0

    def __init__(self):
        self.asked, self.updates = [], []

    def outputs(self, role, what, batch):
        self.asked.append((role, what))
        return torch.full(batch.action_mask.shape, -float(len(role)))

    def update(self, batch, *, sampled_now):
        self.updates.append((sorted(batch.task_index.tolist()), sampled_now))
        metrics = Metrics()
        metrics.add([Metric("loss", 0.0)])
        return Update(metrics)


# --- which policy the ratio compares with -----------------------------------------------------------


def test_with_mode_sampler_the_ratio_compares_with_what_sampled_whatever_the_weights_say_now():
    """Recomputed, every ratio of an asynchronous run would be 1, and nothing would correct for the age of its tokens."""
    batch, trainer = make_batch([3, 5]), Trainer()
    add_outputs(batch, trainer, Needs(), "sampler")
    assert torch.equal(batch.old_logprobs, batch.sampler_logprobs)
    assert trainer.asked == [], "no pass of the model is needed"


def test_with_mode_sampler_the_policy_stands_for_a_sampler_that_nobody_knows():
    batch, trainer = make_batch([3, 5], observations=True), Trainer()
    known = batch.sampler_logprobs.clone()
    batch.sampler_logprobs[1, 3:] = float("nan")
    add_outputs(batch, trainer, Needs(), "sampler")
    assert trainer.asked == [("actor", "logprobs")]
    assert batch.old_logprobs[1, 3:].tolist() == [-5.0, -5.0]
    assert torch.equal(batch.old_logprobs[:, :2], known[:, :2])


def test_with_mode_recompute_the_weights_that_the_step_begins_with_are_asked_once():
    batch, trainer = make_batch([3, 5]), Trainer()
    add_outputs(batch, trainer, Needs(outputs=(Output("logprobs", "actor"), Output("logprobs", "reference"))), "recompute")
    assert batch.old_logprobs.unique().tolist() == [-5.0]
    assert trainer.asked == [("actor", "logprobs"), ("reference", "logprobs")]
    assert batch.logprobs["reference"].unique().tolist() == [-9.0]


def test_with_mode_fused_there_are_none():
    batch = make_batch([3, 5])
    add_outputs(batch, Trainer(), Needs(), "fused")
    assert batch.old_logprobs is None


# --- what an update reports -----------------------------------------------------------------------


def metrics_of(batch, logprobs, **how):
    how = {"sampled_now": True, "against_sampler": False, **how}
    return reduced(actor_metrics(Outputs(logprobs=logprobs), batch, None, **how))


def test_the_mismatch_s_k3_is_of_the_sampler_from_the_trainer():
    """``KL(μ ‖ π)`` by samples of ``μ``: ``e^x − 1 − x`` with ``x = log π − log μ``, which is not the same the other way round."""
    batch = make_batch([1, 2])
    gap = math.log(2.0)
    found = metrics_of(batch, batch.sampler_logprobs + gap)
    assert found["mismatch/k3"] == pytest.approx(2.0 - 1.0 - gap, rel=1e-4)
    assert found["mismatch/k3"] != pytest.approx(0.5 - 1.0 + gap, rel=1e-2)
    assert found["mismatch/mean"] == found["mismatch/max"] == pytest.approx(gap, rel=1e-4)


def test_the_mismatch_is_of_the_policy_that_the_step_began_with():
    batch = make_batch([2, 2])
    batch.old_logprobs = batch.sampler_logprobs - 0.5
    found = metrics_of(batch, batch.sampler_logprobs + 3.0)
    assert found["mismatch/max"] == pytest.approx(0.5, rel=1e-4)
    assert metrics_of(batch, batch.sampler_logprobs + 3.0, against_sampler=True)["mismatch/max"] == pytest.approx(3.0, rel=1e-4)
    assert "mismatch/max" not in metrics_of(batch, batch.sampler_logprobs, sampled_now=False)


def test_the_update_s_kl_is_of_the_old_policy_from_the_new_one():
    batch = make_batch([2, 2])
    batch.old_logprobs = batch.sampler_logprobs.clone()
    found = metrics_of(batch, batch.old_logprobs + math.log(2.0))
    assert found["kl/update"] == pytest.approx(1.0 - math.log(2.0), rel=1e-4)
    assert found["ratio/max_log"] == pytest.approx(math.log(2.0), rel=1e-4)


def test_tokens_of_the_environment_are_in_no_metric():
    batch = make_batch([6, 4], observations=True)
    logprobs = torch.where(batch.action_mask, batch.sampler_logprobs, 50.0)
    assert metrics_of(batch, logprobs)["mismatch/max"] == 0.0


# --- minibatches ------------------------------------------------------------------------------------


def updates_of(batch, **train):
    trainer, config = Trainer(), RunConfig(train=train, seed=3)
    optimize(trainer, batch, 1, sampled=True, config=config, roles=[], run_dir=Path("never"))
    return trainer.updates


@pytest.mark.parametrize(("groups", "minibatches"), [(4, 2), (5, 2), (7, 3), (3, 3), (2, 5)])
def test_every_pass_deals_out_every_group_once(groups, minibatches):
    """Also the last one."""
    rows = [group for group in range(groups) for _ in range(2)]
    updates = updates_of(make_batch([2] * len(rows), groups=rows), epochs=3, minibatches=minibatches)
    parts = min(groups, minibatches)
    assert len(updates) == 3 * parts
    for epoch in range(3):
        dealt = [tasks for tasks, _ in updates[epoch * parts : (epoch + 1) * parts]]
        assert sorted(task for tasks in dealt for task in tasks) == rows
        assert {tasks.count(task) for tasks in dealt for task in tasks} == {2}, "groups stay together"
        assert max(map(len, dealt)) - min(map(len, dealt)) <= 2, "evenly"


def test_passes_shuffle_otherwise_and_only_the_first_update_has_the_weights_that_sampled():
    rows = list(range(16))
    updates = updates_of(make_batch([2] * 16, groups=rows), epochs=2, minibatches=4)
    assert [tasks for tasks, _ in updates[:4]] != [tasks for tasks, _ in updates[4:]]
    assert [sampled for _, sampled in updates] == [True] + [False] * 7
    assert updates == updates_of(make_batch([2] * 16, groups=rows), epochs=2, minibatches=4), "by seed and step"


# --- versions ---------------------------------------------------------------------------------------


def test_staleness_counts_the_versions_between_a_token_and_the_weights_that_it_trains():
    batch = make_batch([2, 2])
    batch.version, batch.versions = 5, torch.tensor([[5, 4], [3, 3]])
    found = staleness(batch, 2)
    assert (found["staleness/mean"], found["staleness/max"], found["staleness/mixed"]) == (1.25, 2.0, 0.5)
    assert [found[f"staleness/lag{lag}"] for lag in range(3)] == [0.25, 0.25, 0.5]
    for wrong in (torch.tensor([[5, 4], [2, 3]]), torch.tensor([[5, 6], [3, 3]])):
        batch.versions = wrong
        with pytest.raises(RunError, match="this is a defect of the host or of the engine"):
            staleness(batch, 2)


def test_a_batch_begins_with_the_version_that_the_engines_have():
    """And after the step the engines have the next one."""
    seen = []

    class Source:
        steps = None

        def draw(self, step, version):
            seen.append(("drawn", step, version))
            return Drawn(make_batch([2, 2]), [], sampled=True)

    made = Loop.__new__(Loop)
    made.row_metrics, made.gate, made.in_flight = RowMetrics(), None, False
    made.keeper = SimpleNamespace(forget=lambda: None, waited_s=0.0)
    made.parts = RunComponents(
        config=RunConfig(),
        manager=SimpleNamespace(report=lambda *_, **__: None),
        needs=Needs(),
        runtime=SimpleNamespace(trainer=Trainer(), engine=SimpleNamespace(busy_s=0.0), targets=[]),
        bring=None,
        source=Source(),
        events=SimpleNamespace(run=lambda work, interruptible: work.close() or {}),
        run_dir=Path("never"),
        progress=Progress(version=4),
        ledger=None,
    )
    made._take_step(5)
    assert seen == [("drawn", 5, 4)]
    assert made.parts.progress.version == 5


def test_requests_that_hold_up_new_weights_for_ever_are_told_of_and_end_the_run():
    class Silent:
        def expect(self, count):
            pass

        async def generate(self, *request):
            await asyncio.Event().wait()

    async def run():
        gate, made = Gate(Silent()), Loop.__new__(Loop)
        source = SimpleNamespace(pipeline=None)
        made.parts = SimpleNamespace(config=RunConfig(rollout={"stall_s": 0.1}), source=source)
        asked = asyncio.create_task(gate.generate([1], None, (0, 0, 0)))
        await asyncio.sleep(0)
        with pytest.raises(RunError, match=r"no progress .*: new weights wait for 1 requests"):
            await asyncio.wait_for(made.hold(gate), 5)
        asked.cancel()

    asyncio.run(run())


# --- evaluation ---------------------------------------------------------------------------------------


def test_pass_at_k_draws_without_replacement():
    """By counting the subsets (arXiv:2107.03374, eq. 1)."""
    assert pass_at_k(4, 2, 2) == pytest.approx(1 - 1 / 6)
    assert (pass_at_k(4, 0, 2), pass_at_k(4, 1, 4), pass_at_k(4, 1, 1)) == (0.0, 1.0, 0.25)
