"""Groups of workers compute what one worker does; a pool of engines samples what one engine does, whoever dies meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from rlhf_authoring.tensors import make_batch
from safetensors.torch import load_file

from rlhf_host.distributed.ray.heartbeat import Heartbeat
from rlhf_host.errors import LostError, RunError, UserError
from rlhf_host.records.episodes import Sampling, Segment, Task, Trajectory

pytestmark = pytest.mark.timeout(900)


def batch(seed=0):
    """Twelve rows in four groups of unequal lengths, ready for an update of actor and critic."""
    lengths = [9, 4, 7, 1, 12, 5, 6, 2, 20, 3, 3, 8]
    found = make_batch(lengths, groups=[0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3], vocabulary=40, seed=seed)
    shape, generator = found.action_mask.shape, torch.Generator().manual_seed(seed + 1)
    found.advantages, found.returns = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    found.values["critic"] = torch.zeros(shape)
    found.shaped = torch.zeros(shape)
    return found


def weights(runtime, role, directory: Path):
    directory.mkdir()
    runtime.save_role(role, directory)()
    return load_file(directory / "model.safetensors")


@pytest.fixture(scope="module")
def saved_at_first(ray_runtime, tmp_path_factory):
    """What the run's roles are before any test trains them."""
    root = tmp_path_factory.mktemp("first")
    return {role: weights(ray_runtime.runtime, role, root / role) for role in ("actor", "critic")}


# --- before training ----------------------------------------------------------------------------


def test_engines_refuse_before_the_first_sync(ray_runtime):
    engine = ray_runtime.runtime.engine
    with pytest.raises(RunError, match="have no weights of this run yet"):
        ray_runtime.wait(engine.generate([5, 6], Sampling(4), (0, 0, 0)))
    (first, _) = ray_runtime.runtime.targets
    with pytest.raises(RunError, match="no weights of this run"):
        ray_runtime.wait(first.engine.generate([5, 6], Sampling(4), (0, 0, 0)))
    with pytest.raises(RunError, match="holds weights of version -1, not 3: they did not arrive"):
        first.engine.set_version(3)


def test_outputs_come_back_in_the_order_of_rows(ray_runtime, local_runtime, saved_at_first):
    data = batch()
    for role, what in (("actor", "logprobs"), ("critic", "values"), ("critic", "scores")):
        here = local_runtime.runtime.trainer.outputs(role, what, data)
        there = ray_runtime.runtime.trainer.outputs(role, what, data)
        torch.testing.assert_close(there, here, rtol=0, atol=1e-5)


def test_the_likeliest_tokens_of_a_role_come_back_in_the_order_of_rows(ray_runtime, local_runtime, saved_at_first):
    here, there = (one.runtime.trainer.topk("actor", 5, batch()) for one in (local_runtime, ray_runtime))
    torch.testing.assert_close(there.logprobs, here.logprobs, rtol=0, atol=1e-5)
    assert there.ids.equal(here.ids)
    assert there.ids.shape == (12, 20, 5)


def test_more_ranks_than_rows_leave_some_without_work(ray_runtime, local_runtime, saved_at_first):
    data = batch().select([4])
    torch.testing.assert_close(
        ray_runtime.runtime.trainer.outputs("actor", "logprobs", data),
        local_runtime.runtime.trainer.outputs("actor", "logprobs", data),
        rtol=0,
        atol=1e-5,
    )


def test_plugins_ask_roles_through_their_handles(ray_runtime, local_runtime, saved_at_first):
    rows = [
        Trajectory("e", f"g{i}", Task("x"), [Segment("prompt", [5, 6]), Segment("action", list(range(7, 9 + i)))])
        for i in range(3)
    ]
    there = ray_runtime.wait(ray_runtime.handles["actor"].logprobs(rows))
    here = local_runtime.wait(local_runtime.handles["actor"].logprobs(rows))
    assert [len(row) for row in there] == [2, 3, 4]
    for one, other in zip(there, here, strict=True):
        assert one == pytest.approx(other, abs=1e-5)
    assert ray_runtime.handles["critic"].context_length == local_runtime.handles["critic"].context_length


# --- training -----------------------------------------------------------------------------------


def test_groups_of_ranks_train_as_one_worker_does(ray_runtime, local_runtime, saved_at_first, tmp_path):
    """Three updates of actor (two ranks) and critic (one rank, at the same time) against one process."""
    for seed in range(3):
        for trainer in (local_runtime.runtime.trainer, ray_runtime.runtime.trainer):
            trainer.adjust("critic", lr=1e-3 / (1 + seed))
        here = local_runtime.runtime.trainer.update(batch(seed), sampled_now=seed == 0)
        there = ray_runtime.runtime.trainer.update(batch(seed), sampled_now=seed == 0)
        assert here.refused is None
        assert there.refused is None
        expected, found = here.metrics.result(), there.metrics.result()
        assert found.pop("memory/rss_gb") > 0.1, "of the largest rank"
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
        assert (found["lr"], found["critic/lr"]) == pytest.approx((1e-3, 1e-3 / (1 + seed)))
    for role in ("actor", "critic"):
        before = saved_at_first[role]
        here, there = (
            weights(one.runtime, role, tmp_path / f"{place}-{role}")
            for place, one in (("here", local_runtime), ("there", ray_runtime))
        )
        moved = torch.cat([(here[name] - before[name]).flatten() for name in before])
        apart = torch.cat([(here[name] - there[name]).flatten() for name in before])
        assert moved.norm() > 0
        assert apart.norm() / moved.norm() < 1e-3, role


def test_a_loss_that_is_not_finite_on_one_rank_is_refused_by_all(ray_runtime, saved_at_first, tmp_path):
    before = weights(ray_runtime.runtime, "actor", tmp_path / "before")
    data = batch()
    data.advantages[8] = float("nan")
    update = ray_runtime.runtime.trainer.update(data, sampled_now=True)
    assert update.refused is not None
    assert update.refused.startswith("actor: the loss is nan")
    after = weights(ray_runtime.runtime, "actor", tmp_path / "after")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_an_error_in_a_worker_is_raised_here_in_its_own_words(ray_runtime):
    data = batch()
    data.advantages = None
    with pytest.raises(RunError, match="algo:ppo"):
        ray_runtime.runtime.trainer.update(data, sampled_now=True)


def test_optimizers_are_saved_and_loaded_through_a_shared_directory(ray_runtime, saved_at_first, tmp_path):
    runtime = ray_runtime.runtime
    runtime.save_state(tmp_path)()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["actor", "critic"]
    runtime.load_state(tmp_path)
    (tmp_path / "critic").rename(tmp_path / "teacher")
    with pytest.raises(UserError, match="the checkpoint trains actor, teacher, this run actor, critic"):
        runtime.load_state(tmp_path)


def test_workers_write_what_they_copied_beside_the_next_update(ray_runtime, local_runtime, saved_at_first, tmp_path):
    runtime = ray_runtime.runtime
    before = weights(runtime, "actor", tmp_path / "before")
    (tmp_path / "later").mkdir()
    writers = [runtime.save_role("actor", tmp_path / "later"), runtime.save_state(tmp_path / "later")]
    for trainer in (local_runtime.runtime.trainer, runtime.trainer):
        trainer.update(batch(7), sampled_now=False)
    assert sorted(path.name for path in (tmp_path / "later").rglob("*")) == ["actor", "critic"]
    for write in writers:
        write()
    after = load_file(tmp_path / "later/model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)
    state = torch.load(tmp_path / "later/actor/optimizer.pt", weights_only=True)
    runtime.save_state(tmp_path / "later")()
    assert torch.load(tmp_path / "later/actor/optimizer.pt", weights_only=True)["updates"] == state["updates"] + 1


# --- engines ------------------------------------------------------------------------------------

LONG = Sampling(max_new_tokens=100)


async def sample_groups(engine, groups=12, n=4, sampling=LONG, delay=0.0, then=None):
    """A rollout in miniature; ``then`` happens in the middle of it."""
    engine.expect(groups * n)
    tasks = [
        asyncio.ensure_future(engine.generate([5, 6, 7 + group], sampling, (group, sample, 0)))
        for group in range(groups)
        for sample in range(n)
    ]
    if then is not None:
        await asyncio.sleep(delay)
        then(tasks)
    return await asyncio.gather(*tasks, return_exceptions=True)


def tokens(generations):
    return [one.token_ids for one in generations]


@pytest.fixture(scope="module")
def synced(ray_runtime, saved_at_first):
    """Engines with the weights that the tests above left; and what they sample."""
    ray_runtime.wait(ray_runtime.runtime.sync(4))
    return ray_runtime, ray_runtime.wait(sample_groups(ray_runtime.runtime.engine))


def trainer_gap(started, generations, prompt):
    """Largest difference between sampled and trainer's log-probabilities."""
    rows = [
        Trajectory("e", "g", Task("x"), [Segment("prompt", prompt), Segment("action", one.token_ids)]) for one in generations
    ]
    found = started.wait(started.handles["actor"].logprobs(rows))
    return max(abs(a - b) for one, row in zip(generations, found, strict=True) for a, b in zip(one.logprobs, row, strict=True))


def test_what_engines_sample_is_the_trainer_s_and_carries_its_version(synced):
    started, generations = synced
    assert {version for one in generations for version in one.versions} == {4}
    assert trainer_gap(started, generations[:4], [5, 6, 7]) < 1e-4
    assert len({tuple(one.token_ids) for one in generations}) > 12


def test_every_engine_samples_the_same_of_the_same_key(synced):
    started, generations = synced
    for target in started.runtime.targets:
        assert started.wait(target.engine.generate([5, 6, 7], LONG, (0, 0, 0))).token_ids == generations[0].token_ids


def test_a_request_that_cannot_be_served_fails_alone(synced):
    started, generations = synced
    engine = started.runtime.engine

    async def both():
        return await asyncio.gather(
            engine.generate([5, 6, 7], LONG, (0, 0, 0)), engine.generate([], LONG, (1, 0, 0)), return_exceptions=True
        )

    served, failed = started.wait(both())
    assert served.token_ids == generations[0].token_ids
    assert isinstance(failed, UserError)
    assert "an empty prompt" in str(failed)


def test_cancelled_requests_are_aborted_and_the_others_answered(synced):
    started, generations = synced

    def cancel(tasks):
        for task in tasks[::2]:
            task.cancel()

    found = started.wait(sample_groups(started.runtime.engine, delay=0.05, then=cancel))
    assert tokens(found[1::2]) == tokens(generations[1::2])
    assert all(
        isinstance(one, asyncio.CancelledError) or one.token_ids == generations[2 * i].token_ids
        for i, one in enumerate(found[::2])
    )
    assert tokens(started.wait(sample_groups(started.runtime.engine))) == tokens(generations)


async def back(started, version):
    """Until both engines serve ``version``, with nothing of a revival left to do: here the event loop stops between awaits, and a
    sync that stops with it keeps updates waiting."""
    engine = started.runtime.engine
    while [target.engine.version for target in engine.lives.targets] != [version, version]:
        await asyncio.sleep(0.1)
    await asyncio.gather(*(seat.revival for seat in engine.lives.seats if seat.revival is not None))


@contextmanager
def impatient(started):
    """Silence is noticed after seconds."""
    heartbeat = Heartbeat(started.runtime.processes, 3.0)
    yield
    heartbeat.stop()


@pytest.mark.parametrize(("blow", "seat"), [(signal.SIGKILL, 0), (signal.SIGSTOP, 1)])  # groups stay where the first left them
def test_an_engine_killed_or_stopped_in_mid_rollout_loses_nothing_and_comes_back_with_current_weights(synced, blow, seat):
    started, generations = synced
    engine = started.runtime.engine
    victim, lives = started.runtime.targets[seat].engine, engine.lives.restarts

    with impatient(started):
        found = started.wait(sample_groups(engine, delay=0.01, then=lambda tasks: os.kill(victim.pid, blow)))
    assert tokens(found) == tokens(generations)

    started.wait(back(started, 4))
    new = started.runtime.targets[seat].engine
    assert new.pid != victim.pid
    assert engine.lives.restarts == lives + 1
    again = [started.wait(new.generate([5, 6, 7], LONG, (0, sample, 0))) for sample in range(4)]
    assert tokens(again) == tokens(generations[:4])
    assert trainer_gap(started, again, [5, 6, 7]) < 1e-4


def test_a_sync_goes_on_without_an_engine_that_died_and_reaches_it_when_it_is_back(synced):
    started, _ = synced
    runtime = started.runtime
    os.kill(runtime.targets[1].engine.pid, signal.SIGKILL)
    runtime.trainer.update(batch(5), sampled_now=True)
    started.wait(runtime.sync(5))
    assert runtime.engine.version == 5
    (one,) = started.wait(sample_groups(runtime.engine, groups=1, n=1))
    assert set(one.versions) == {5}

    started.wait(back(started, 5))
    again = [started.wait(target.engine.generate([5, 6, 7], LONG, (0, 0, 0))) for target in runtime.targets]
    assert tokens(again) == tokens([one, one])


def test_a_process_that_never_comes_up_is_named(ray_runtime):
    import ray

    from rlhf_host.distributed.ray.worker_group import wait_all

    never = ray.remote(num_cpus=1000)(lambda: None).remote()
    with pytest.raises(RunError, match=r"a worker of actor has not started within 0\.2 s"):
        wait_all([never], "actor", within_s=0.2)
    ray.cancel(never)


def test_a_rank_that_is_stopped_ends_what_waits_for_it(ray_runtime, caplog):
    """The last one: after it there is no trainer."""
    import ray

    trainer = ray_runtime.runtime.trainer
    os.kill(ray.get(trainer.by_role["actor"].actors[1].look.remote())["pid"], signal.SIGSTOP)
    with impatient(ray_runtime), pytest.raises(LostError, match="a worker of actor is lost"):
        trainer.update(batch(), sampled_now=True)
    assert "a worker of actor has not answered for" in caplog.text
