"""A worker's GPU is the one that Ray gave it, and its threads are its share of the machine's CPUs."""

import asyncio
import os
from types import SimpleNamespace

import pytest
import torch

from rlhf_host.config.schema import PluginChoice
from rlhf_host.distributed.ray import actors
from rlhf_host.distributed.ray.actors import EngineActor, WorkerActor
from rlhf_host.distributed.ray.worker_group import wait_all
from rlhf_host.errors import RunError
from rlhf_host.models.loading import choose_device

pytest.importorskip("ray")


@pytest.fixture
def third_gpu(monkeypatch):
    """Ray gave this process the GPU 2 and left the variable alone, as ``RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES`` says."""
    monkeypatch.setattr("ray.get_gpu_ids", lambda: [2])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")


def test_a_worker_sees_only_the_gpu_that_ray_gave_it(third_gpu):
    seen = []

    def build(ranks):
        seen.append((os.environ["CUDA_VISIBLE_DEVICES"], str(choose_device("auto"))))
        return SimpleNamespace(context_lengths={}, exact=True, flops=None)

    setup = SimpleNamespace(start=SimpleNamespace(train=SimpleNamespace(threads=0)), roles=[], build=build)
    WorkerActor().start(setup, 0, 1, "10.0.0.1", 1, 1, True)
    WorkerActor().start(setup, 0, 1, "10.0.0.1", 1, 1, False)
    assert seen == [("2", "cuda"), ("", "cuda")]


@pytest.mark.parametrize(("told", "visible"), [(None, "2"), (["0", "1"], "0,1"), ([], "")])
def test_an_engine_sees_its_gpus(third_gpu, monkeypatch, told, visible):
    seen = []

    def engine(setup, thread):
        seen.append(os.environ["CUDA_VISIBLE_DEVICES"])
        return SimpleNamespace(version=0, context_length=None, exact=True, dead=False)

    monkeypatch.setattr(actors, "start_engine", engine)
    monkeypatch.setattr("rlhf_host.runtimes.compute.OneThread", lambda threads: None)
    asyncio.run(EngineActor().start(None, 0, told))
    assert seen == [visible]


def threads_of(started):
    """Threads of every worker's operators, and what its environment says."""
    import ray

    actors = [actor for group in started.runtime.trainer.groups for actor in group.actors]
    look = [actor.__ray_call__.remote(lambda _: (torch.get_num_threads(), os.environ["OMP_NUM_THREADS"])) for actor in actors]
    return ray.get(look)


@pytest.mark.parametrize(
    ("own", "placement", "threads"),
    [
        (None, [], [(2, "2")]),
        ("1", [], [(1, "1")]),
        (None, ["actor+rollout=1", "critic=1"], [(1, "1"), (1, "1")]),
    ],
    ids=["two CPUs and one worker", "the user's own", "a placement of CPUs"],
)
def test_a_worker_computes_with_its_share_of_the_machine_s_cpus(config, starting, monkeypatch, own, placement, threads):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if own is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", own)
    more = {"placement": placement, "train": config.train.model_copy(update={"threads": 0})}
    more["runtime"] = PluginChoice(name="ray", num_cpus=2, num_gpus=0, object_store_mb=100)
    started = starting(config.model_copy(update=more))
    assert threads_of(started) == threads
    if own is None and not placement:
        many_answers_are_waited_for_together(monkeypatch)


def many_answers_are_waited_for_together(monkeypatch):
    import ray

    references, waits, wait = [ray.put(number) for number in range(200)], [], ray.wait
    monkeypatch.setattr(ray, "wait", lambda *arguments, **named: waits.append(1) or wait(*arguments, **named))
    assert wait_all(references, "actor") == list(range(200))
    assert len(waits) <= 4, "not one for each"

    @ray.remote(num_cpus=0)
    def fail(seconds):
        import time

        time.sleep(seconds)
        raise ValueError("no such thing")

    never, fails = fail.remote(600), fail.remote(0)
    with pytest.raises(RunError, match="a worker of critic failed: ValueError: no such thing"):
        wait_all([references[0], never, fails], "actor", "reference", "critic")
    ray.cancel(never, force=True)
