"""Functions in all processes of an engine: results by rank, one load together, ends that fail. Threads stand in for processes."""

from __future__ import annotations

import threading

import pytest
import torch

from rlhf_host.distributed.vllm.remote_runs import RemoteRuns
from rlhf_host.distributed.vllm.worker_runs import WorkerRuns, pickled, unpickled
from rlhf_host.errors import RunError

GATE = threading.Event()


class Engine:
    """Two processes. ``said`` has what happened, in order."""

    def __init__(self, fails=()):
        self.version, self.said, self.fails, self.refusal = -1, [], fails, ""
        self.workers = [WorkerRuns("e", rank, 2, torch.device("cpu"), self.replacing(rank)) for rank in range(2)]
        self.runs = RemoteRuns(self.ask, self.load)

    def replacing(self, rank):
        def replace(buckets):
            for bucket in buckets:
                self.said.append((rank, bucket))
            if rank in self.fails:
                raise ValueError(f"process {rank} is full")

        return replace

    def ask(self, method, *arguments):
        return [getattr(worker, method)(*arguments) for worker in self.workers]

    def load(self, work, version):
        if self.refusal:
            raise RunError(self.refusal)
        self.version = -1
        work(self.ask)
        self.said.append(("version", version))
        self.version = version

    def run(self, function, **arguments):
        return self.runs.run(f"{__name__}:{function}", arguments)


def bring(loader, version):
    loader.state["calls"] = loader.state.get("calls", 0) + 1
    loader.load(iter(["bucket"]), version)
    return [loader.engine, loader.rank, loader.size, loader.state["calls"]]


def bring_in_one(loader, version):
    if loader.rank == 0:
        loader.load(iter(["bucket"]), version)


def bring_late(loader, version):
    def late():
        GATE.wait(60)
        yield "bucket"

    loader.load(late(), version)


def say(loader, text):
    return f"{text} {loader.rank}"


def break_off(loader):
    raise KeyError(loader.rank)


def test_results_come_by_rank_and_the_version_after_all_have_loaded():
    engine = Engine()
    assert engine.run("bring", version=3) == [["e", 0, 2, 1], ["e", 1, 2, 1]]
    assert sorted(engine.said[:2]) == [(0, "bucket"), (1, "bucket")]
    assert engine.said[2:] == [("version", 3)]
    assert engine.run("bring", version=4) == [["e", 0, 2, 2], ["e", 1, 2, 2]]
    assert not any(worker.runs for worker in engine.workers)


def test_one_process_that_fails_leaves_the_engine_without_weights():
    engine = Engine(fails=[1])
    with pytest.raises(RunError, match=r"engine e: loading version 3 failed \(process 1 is full\)|process 1 is full"):
        engine.run("bring", version=3)
    assert engine.version == -1
    engine.fails = []
    engine.run("bring", version=4)
    assert engine.version == 4


def test_a_refusal_reaches_the_function_in_every_process():
    engine = Engine()
    engine.refusal = "engine e is asleep"
    with pytest.raises(RunError, match="engine e is asleep"):
        engine.run("bring", version=3)
    assert engine.said == []


def test_all_processes_load_or_none():
    engine = Engine()
    with pytest.raises(RunError, match="not all processes of the engine load the same version"):
        engine.run("bring_in_one", version=3)
    assert engine.said == []


def test_other_calls_are_answered_while_a_load_waits_for_the_trainer():
    engine = Engine()
    GATE.clear()
    loading = threading.Thread(target=engine.run, args=("bring_late",), kwargs={"version": 5})
    loading.start()
    assert engine.run("say", text="process") == ["process 0", "process 1"]
    assert engine.version == -1
    GATE.set()
    loading.join(60)
    assert engine.version == 5


def test_the_first_failure_is_raised_as_it_was():
    with pytest.raises(KeyError):
        Engine().run("break_off")


def test_what_cannot_travel_becomes_an_error_that_says_so():
    assert unpickled(pickled(True, [1, "a"])) == [1, "a"]
    with pytest.raises(RunError, match="pickle"):
        unpickled(pickled(True, threading.Lock()))

    class Local(Exception):
        pass

    with pytest.raises(RunError, match="Local: gone"):
        unpickled(pickled(False, Local("gone")))
