"""A Ray runtime with two actor ranks, a critic apart and two engines: started once, because starting is what takes long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from rlhf_host.config.resolve import merge_needs, resolve
from rlhf_host.config.schema import DataConfig, DataSource, PluginChoice, RoleConfig, RunConfig, SyncChoice
from rlhf_host.models.loading import load_tokenizer
from rlhf_host.training.assemble import runtime_start, start_runtime

pytest.importorskip("ray")  # imported before the run sets anything, as a notebook may

RAY = {"num_cpus": 5, "num_gpus": 0, "object_store_mb": 200}


@dataclass
class Started:
    """A runtime, its roles' handles, and an event loop to await things on."""

    runtime: Any
    handles: Any
    loop: asyncio.AbstractEventLoop

    def wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, 240))


def start(config: RunConfig) -> Started:
    manager = resolve(config).plugins()
    tokenizer = load_tokenizer(config.roles["actor"])
    started = start_runtime(config, runtime_start(config, manager, merge_needs(manager), tokenizer, 100, {}))
    return Started(started.runtime, started.handles, asyncio.new_event_loop())


@pytest.fixture(scope="module")
def config(tiny_model, prompts, tmp_path_factory) -> RunConfig:
    role = RoleConfig(model=str(tiny_model), lr=1e-3, adam_eps=1e-4)
    return resolve(
        RunConfig(
            roles={"actor": role, "critic": role},
            algo=PluginChoice(name="ppo"),
            reward={"maths": {"name": "math_verifier"}},
            data=DataConfig(sources=[DataSource(path=str(prompts))]),
            train={"threads": 1},
            runtime=PluginChoice(name="ray", **RAY),
            placement=["actor+rollout=2", "critic=1"],
            run_dir=str(tmp_path_factory.mktemp("run")),
        )
    ).config


@pytest.fixture(scope="module")
def ray_runtime(config) -> Iterator[Started]:
    started = start(config)
    yield started
    started.wait(started.runtime.close())
    started.loop.close()


@pytest.fixture
def starting() -> Iterator[Callable[[RunConfig], Started]]:
    """Starts a runtime that is closed after the test."""
    running: list[Started] = []

    def begin(config: RunConfig) -> Started:
        running.append(start(config))
        return running[-1]

    yield begin
    for started in running:
        started.wait(started.runtime.close())
        started.loop.close()


@pytest.fixture
def local_runtime(config) -> Iterator[Started]:
    """The same roles in this process: what groups of workers are compared with."""
    here = config.model_copy(update={"runtime": PluginChoice(name="local"), "sync": SyncChoice(name="in_process")})
    started = start(here)
    yield started
    started.wait(started.runtime.close())
    started.loop.close()
