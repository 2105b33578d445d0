"""Sampling ahead of training where something fails, hangs or is interrupted: the run ends in time, says why, and goes on later."""

from __future__ import annotations

import json
import os
import signal
import threading
import time

import pytest

import rlhf_host
from rlhf_host import RunError, Step, hookimpl
from rlhf_host.engines.embedded import EmbeddedEngine
from rlhf_host.runtimes.local_runtime import LocalRuntime
from rlhf_host.training.checkpoints import load_checkpoint
from rlhf_host.training.worker import Worker

STEPS = 6
WITHIN_S = 30.0


class Trouble:
    """Happens once, at the ``at``-th time that ``place`` is passed: ``raises``, ``hangs`` or ``interrupts``."""

    def __init__(self, what=None, place=None, at=0):
        self.what, self.place, self.left = what, place, at

    def passes(self, place):
        if place != self.place:
            return
        self.left -= 1
        if self.left:
            return
        if self.what == "raises":
            raise RunError("it is down") if place in ("engine", "sync", "update") else ConnectionError("it is down")
        if self.what == "hangs":
            threading.Event().wait()
        os.kill(os.getpid(), signal.SIGINT)


class Everything:
    """Agent, filter and extension in one."""

    def __init__(self, trouble):
        self.trouble = trouble

    @hookimpl
    def agent_reset(self, episode):
        return Step(episode.task.prompt)

    @hookimpl
    def agent_step(self, episode, action):
        self.trouble.passes("agent" if episode.split == "train" else "agent in evaluation")
        return Step(done=True)


class Controller:
    def __init__(self, trouble):
        self.trouble = trouble

    @hookimpl
    def keep_group(self, group):
        self.trouble.passes("filter")
        return True

    @hookimpl
    def prepare_batch(self, experience):
        self.trouble.passes("batch")

    @hookimpl
    def step_finished(self, step, metrics):
        self.trouble.passes("step_finished")


class Vowels:
    def __init__(self, trouble):
        self.trouble = trouble

    @hookimpl
    def score(self, trajectories, context):
        self.trouble.passes("score" if context.split == "train" else "score in evaluation")
        return [sum(char in "aeiou" for char in row.text) / 8 for row in trajectories]


@pytest.fixture
def train(tiny_model, prompts, tmp_path, monkeypatch):
    current = Trouble()

    def passing(owner, name, place):
        method = getattr(owner, name)

        def passed(self, *arguments, **named):
            current.passes(place)
            return method(self, *arguments, **named)

        monkeypatch.setattr(owner, name, passed)

    passing(EmbeddedEngine, "generate", "engine")
    passing(LocalRuntime, "sync", "sync")
    passing(Worker, "update", "update")

    def run(trouble, **settings):
        nonlocal current
        current = trouble
        plugins = {"rewards": {"vowels": Vowels(trouble)}, "agent": Everything(trouble), "extensions": [Controller(trouble)]}
        if "resume" in settings:
            return rlhf_host.train(**plugins, **settings)
        small = {"rollout": {"n": 2, "max_new_tokens": 8, "step_timeout_s": 1.0, "score_timeout_s": 1.0}, "kernels": "none"}
        small |= {"train.steps": STEPS, "train.batch_size": 2, "train.threads": 1, "eval.every": 2, "eval.data.max_samples": 2}
        small |= {"checkpoint.every": 2, "async_depth": 2, "trajectories.every": 0, "run_dir": str(tmp_path / "run")}
        small |= {"rollout.max_unjudged": 0.9}
        return rlhf_host.train(algo="rloo", model=tiny_model, data=prompts, eval_data=prompts, **plugins, **small, **settings)

    return run


GOES_ON = {"agent", "score", "agent in evaluation", "score in evaluation"}
"""Places at which one episode or group is lost, and the run goes on."""
PLACES = [*GOES_ON, "filter", "batch", "update", "sync", "step_finished", "engine"]
AT = {
    "agent": 20,
    "engine": 22,
    "batch": 4,
    "update": 4,
    "sync": 5,
    "step_finished": 4,
    "agent in evaluation": 5,
    "score in evaluation": 3,
}
CASES = [(what, place) for what in ("raises", "interrupts") for place in sorted(PLACES)]
CASES += [("hangs", place) for place in sorted(GOES_ON)]


@pytest.mark.parametrize(("what", "place"), CASES, ids=lambda value: str(value).replace(" ", "_"))
def test_it_ends_in_time_says_why_and_goes_on_later(train, tmp_path, what, place):
    run, trouble = tmp_path / "run", Trouble(what, place, AT.get(place, 11))
    started = time.monotonic()
    if what == "interrupts":
        outcome = train(trouble).outcome
        assert outcome.status == "interrupted"
    elif place in GOES_ON:
        assert train(trouble).outcome.status == "finished"
    else:
        with pytest.raises(RunError, match="it is down"):
            train(trouble)
    assert trouble.left <= 0, "nothing happened"
    assert time.monotonic() - started < WITHIN_S
    checkpoint = load_checkpoint(run)
    assert checkpoint is not None
    assert checkpoint.step >= 2
    if what == "interrupts" or place not in GOES_ON:
        assert train(Trouble(), resume=run).outcome.status == "finished"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["step"]] == list(range(1, STEPS + 1))
    if what != "interrupts" and place in GOES_ON:
        lost = ("rollout/failed", "rollout/unjudged", "eval/failed", "eval/unjudged")
        assert sum(row.get(name, 0.0) for row in rows for name in lost) > 0
    ledger = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    numbers = [draw[0] for row in ledger for draw in row["draws"]]
    assert numbers == list(range(len(numbers)))
    assert [row["step"] for row in ledger] == list(range(1, STEPS + 1))


def test_an_engine_that_hangs_ends_the_run(train, tmp_path, monkeypatch):
    async def never(self, request):
        import asyncio

        await asyncio.sleep(3600)

    from rlhf_host.engines.waves import Waves

    submit, calls = Waves.submit, iter(range(10_000))

    async def sometimes(self, request):
        return await (never(self, request) if next(calls) > 20 else submit(self, request))

    monkeypatch.setattr(Waves, "submit", sometimes)
    with pytest.raises(RunError, match=r"no progress in the rollout for 2 s .* requests are with engine transformers"):
        train(Trouble(), **{"rollout.stall_s": 2.0})
    assert load_checkpoint(tmp_path / "run") is not None
