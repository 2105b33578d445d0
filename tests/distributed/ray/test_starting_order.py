"""The runtime's own start with processes that only note what is asked of them, and in which order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_host import Needs
from rlhf_host.distributed.ray import runtime as ray_runtime
from rlhf_host.distributed.ray.actors import EngineActor, EngineInfo, Loaded
from rlhf_host.distributed.ray.placement import Place
from rlhf_host.distributed.ray.runtime import RayRuntime
from rlhf_host.protocols import NO_WEIGHTS, EngineTraits


class Process:
    """A Ray handle whose methods are noted; ``nodes`` are the machines of the devices."""

    def __init__(self, cls: type, device: int, said: list[tuple[str, int, Any]], nodes: list[str]):
        self.kind, self.device, self.said, self.nodes = "engine" if cls is EngineActor else "worker", device, said, nodes

    def __getattr__(self, method: str) -> Any:
        if method.startswith("__"):
            raise AttributeError(method)

        def remote(*arguments: Any) -> Any:
            self.said.append((f"{self.kind} {method}", self.device, arguments))
            return SimpleNamespace(what=f"{self.kind} {method}", device=self.device, value=self.answer(method))

        return SimpleNamespace(remote=remote, options=lambda **_: SimpleNamespace(remote=remote))

    def answer(self, method: str) -> Any:
        if method == "look":
            node = self.nodes[self.device]
            return {"address": node, "port": 100 + self.device, "gpus": [str(self.device)], "node": node, "pid": 1}
        if self.kind == "engine":
            return EngineInfo(f"l{self.device}", NO_WEIGHTS, None, True, 1)
        return Loaded({"actor": 64}, True, None)


@pytest.fixture
def started(monkeypatch):
    """Function that starts a worker and an engine on each device, and returns the runtime and all that was said."""
    said: list[tuple[str, int, Any]] = []

    def waited(references: Any, *names: str, within_s: float | None = None) -> list[Any]:
        references = list(references)
        said.extend((f"waited for {each.what}", each.device, ()) for each in references)
        return [each.value for each in references]

    def start(nodes: list[str], *, sleeps: bool, kind: str = "gpu") -> tuple[RayRuntime, list[tuple[str, int, Any]]]:
        monkeypatch.setattr(ray_runtime, "wait_all", waited)
        monkeypatch.setattr("rlhf_host.distributed.ray.engine_pool.wait_all", waited)
        monkeypatch.setattr(ray_runtime, "_actor", lambda cls, place, bundles, device, *_: Process(cls, device, said, nodes))
        setup = SimpleNamespace(version=NO_WEIGHTS, mixed=None)
        monkeypatch.setattr(ray_runtime.EngineSetup, "of", lambda start, role: setup)
        monkeypatch.setattr(ray_runtime.RemoteRoles, "of", lambda start, roles: SimpleNamespace(roles=[]))
        monkeypatch.setattr(ray_runtime, "role_views", lambda roles: ())
        monkeypatch.setattr(ray_runtime, "shards_of", lambda place, start: 1)
        monkeypatch.setattr(ray_runtime, "Heartbeat", lambda *_: None)
        monkeypatch.setattr(ray_runtime.AlgoNeeds, "of", lambda needs: SimpleNamespace(unit_rows=False))
        runtime = RayRuntime.__new__(RayRuntime)
        runtime._options = SimpleNamespace(wait_s=1.0, stall_s=1.0)
        runtime.cluster = SimpleNamespace(lacks_devices=lambda *_: False, cpus=lambda: dict.fromkeys(nodes, 8))
        size = len(nodes)
        place = Place(("actor",), kind, (1,) * size, "PACK", tuple((device,) for device in range(size)), ("rollout",))
        engine = SimpleNamespace(build=lambda: SimpleNamespace(traits=EngineTraits(sleeps=sleeps)))
        plan = SimpleNamespace(engine=engine, train=SimpleNamespace(threads=0), needs=Needs(), placement=["actor+rollout=2"])
        plan.total_updates = 1
        runtime._start(plan, [place], [None])
        return runtime, said

    return start


def test_on_cpus_a_line_says_that_sleep_frees_nothing(started, caplog):
    started(["a"], sleeps=True)
    assert not caplog.messages
    started(["a"], sleeps=True, kind="cpu")
    assert caplog.messages == ["engines and trainer share CPUs, where sleeping engines free nothing and a trainer's data stays"]


def test_engines_have_planned_their_memory_and_sleep_before_workers_load(started):
    order = [what for what, *_ in started(["a", "a"], sleeps=True)[1]]
    before = order[: order.index("worker start")]
    assert before.count("waited for engine start") == 2
    assert before.index("waited for engine start") < before.index("engine sleep")


def test_ranks_are_processes_in_the_order_of_machines(started):
    runtime, said = started(["b", "a", "b", "a"], sleeps=False)
    starts = [(device, arguments) for what, device, arguments in said if what == "worker start"]
    assert {arguments[1]: device for device, arguments in starts} == {0: 0, 1: 2, 2: 1, 3: 3}
    assert {arguments[3:5] for _, arguments in starts} == {("b", 100)}
    assert [actor.device for actor in runtime.trainer.groups[0].actors] == [0, 2, 1, 3]
