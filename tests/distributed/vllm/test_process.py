"""vLLM's core in a process of its own, as on GPUs."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhf_host.distributed.vllm import startup
from rlhf_host.distributed.vllm.arguments import versions_by_token
from rlhf_host.errors import RunError
from rlhf_host.records.episodes import Sampling

from .rig import Rig, make_engine, mismatch, prompts_of, write_model

pytest.importorskip("vllm")
psutil = pytest.importorskip("psutil")


def cores():
    """The processes of vLLM below this one."""
    return [child for child in psutil.Process().children(recursive=True) if "VLLM" in child.name()]


def wait_for_end(process, seconds=60.0):
    """One that has ended may be kept by its parent as a zombie, which holds nothing but its number."""
    deadline = time.monotonic() + seconds
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_core_in_its_own_process_samples_what_one_in_this_process_does(tmp_path, monkeypatch):
    """The branch that a GPU takes by itself; vLLM for CPUs does not schedule ahead."""
    from transformers import AutoModelForCausalLM

    directory = write_model(tmp_path / "model", tied=True)
    model = AutoModelForCausalLM.from_pretrained(directory)
    here = Rig(make_engine(directory), model)
    monkeypatch.setattr(startup, "on_gpus", lambda: True)
    apart = Rig(make_engine(directory), model)
    try:
        assert (here.engine.multiprocess, apart.engine.multiprocess) == (False, True)
        (core,) = cores()
        prompts = [prompt for prompt in prompts_of(4, 140) for _ in range(4)]
        for version in (0, 1):
            apart.train(version)
            here.sync(version)
            apart.sync(version)
            ours, theirs = here.sample(prompts, Sampling(24)), apart.sample(prompts, Sampling(24))
            assert [made.token_ids for made in theirs] == [made.token_ids for made in ours]
            for mine, other in zip(ours, theirs, strict=True):
                assert other.logprobs == pytest.approx(mine.logprobs, abs=1e-5)
                assert other.versions == [version] * 24
            assert mismatch(model, prompts, theirs) <= 1e-4

        async def in_flight():
            begun = apart.engine.sampled
            jobs = [asyncio.create_task(apart.engine.generate(prompts[i], Sampling(300), (9, i))) for i in range(4)]
            while apart.engine.sampled == begun:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(apart.sync, 2)
            return await asyncio.gather(*jobs)

        if versions_by_token():
            made = asyncio.run(in_flight())
            assert all(set(one.versions) == {1, 2} for one in made)
            assert mismatch(model, prompts[:4], made) <= 1e-4, "the weights are the same"
    finally:
        asyncio.run(here.engine.close())
        asyncio.run(apart.engine.close())
    wait_for_end(core)


@pytest.mark.timeout(300)
def test_a_core_that_is_killed_ends_its_requests_with_a_message(tmp_path):
    engine = make_engine(write_model(tmp_path / "model", tied=True), version=0, multiprocess=True)

    async def until_it_fails():
        while True:
            await engine.run("builtins:repr")

    async def killed():
        jobs = [asyncio.create_task(engine.generate([3, 4, 5], Sampling(400), (1, 2, row))) for row in range(4)]
        while not engine.sampled:
            await asyncio.sleep(0.01)
        (core,) = cores()
        core.kill()
        with pytest.raises(RunError, match="vLLM's core has ended"):
            await until_it_fails()
        return await asyncio.wait_for(asyncio.gather(*jobs, return_exceptions=True), 60)

    said = asyncio.run(killed())
    assert all(str(error).startswith("engine vllm died: the process of vLLM's core has ended") for error in said)
    assert engine.dead
    asyncio.run(asyncio.wait_for(engine.close(), 60))


HOST = """
import asyncio, signal, sys
from pathlib import Path
from rlhf_host.records.episodes import Sampling
from tests.distributed.vllm.test_process import cores
from tests.distributed.vllm.rig import make_engine

if __name__ == "__main__":
    interrupts = []
    signal.signal(signal.SIGINT, lambda *_: interrupts.append(1))
    engine = make_engine(Path(sys.argv[1]), version=0, multiprocess=True)
    print(*(core.pid for core in cores()), flush=True)
    for line in sys.stdin:
        made = asyncio.run(engine.generate([3, 4, 5], Sampling(8), (1, 2, 3)))
        print(len(interrupts), len(made.token_ids), flush=True)
"""


def test_it_ends_with_its_host_and_not_before(tmp_path):
    """Ctrl-C goes to every process of a terminal: the core must live until the host, which finishes its step, closes it."""
    directory = write_model(tmp_path / "model", tied=True)
    script = tmp_path / "host.py"
    script.write_text(HOST)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    host = subprocess.Popen([sys.executable, script, directory], env=environment, start_new_session=True, **pipes)
    try:
        (pid,) = map(int, host.stdout.readline().split())
        core = psutil.Process(pid)
        os.killpg(host.pid, signal.SIGINT)
        time.sleep(1)
        host.stdin.write("sample\n")
        host.stdin.flush()
        assert host.stdout.readline().split() == ["1", "8"]
        assert core.status() != psutil.STATUS_ZOMBIE
        host.kill()
        wait_for_end(core)
    finally:
        host.kill()
        host.communicate()
