"""Where the seconds go from ``rlhf train`` to the end of the first step on Ray with DeepSpeed and vLLM: the controller's own and
its waits, and what every worker's and engine's process does meanwhile.

    python benchmarks/ray_startup.py            # two ranks, one engine, a 0.6M-parameter Llama made on the spot
    python benchmarks/ray_startup.py --backend torch --engine transformers

The arguments are flags of ``rlhf train``. A library's seconds are those of importing it, without the other libraries of the list
that it imports first. Processes start side by side, so that on few cores each is slower than alone.
"""

from __future__ import annotations

import builtins
import functools
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LIBRARIES = ("torch", "transformers", "deepspeed", "vllm", "ray", "rlhf_host")
STAMPS = "RLHF_BENCH_STAMPS"
"""Names the folder where every process writes what it measured."""


class Clock:
    """Seconds by name. What is measured within something else that is measured counts for itself alone."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._open = threading.local()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        stack = self._open.__dict__.setdefault("stack", [])
        stack.append(0.0)
        began = time.perf_counter()
        try:
            yield
        finally:
            took, inner = time.perf_counter() - began, stack.pop()
            self.seconds[name] = self.seconds.get(name, 0.0) + took - inner
            if stack:
                stack[-1] += took

    def timed(self, owner: Any, method: str, name: str) -> None:
        """Measure a function wherever it is called by way of ``owner``."""
        plain: Callable[..., Any] = getattr(owner, method)

        @functools.wraps(plain)
        def call(*arguments: Any, **named: Any) -> Any:
            with self(name):
                return plain(*arguments, **named)

        setattr(owner, method, call)

    def imports(self) -> None:
        """Measure the imports of ``LIBRARIES`` from here on."""
        plain = builtins.__import__

        def load(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
            root = name.partition(".")[0]
            if root not in LIBRARIES or name in sys.modules or level:
                return plain(name, globals, locals, fromlist, level)
            with self(f"import {root}"):
                return plain(name, globals, locals, fromlist, level)

        builtins.__import__ = load

    def save(self, who: str, **more: float) -> None:
        Path(os.environ[STAMPS], f"{who}.json").write_text(json.dumps({**more, **self.seconds}))


def since_process_began() -> float:
    import psutil

    return time.time() - psutil.Process().create_time()


def instrument() -> None:
    """Replace the runtime's two kinds of process by such as measure themselves. The classes travel by value."""
    from rlhf_host.runtimes import ray as runtime

    class Worker(runtime.WorkerActor):
        def __init__(self) -> None:
            self.clock, self.up = Clock(), since_process_began()

        def start(self, setup: Any, rank: int, *meeting: Any) -> Any:
            began = time.perf_counter()
            self.clock.imports()
            import rlhf_host.runtimes.ray_actors as actors
            from rlhf_host.backends.ranks import Ranks
            from rlhf_host.models import loading

            self.clock.timed(loading, "load_model", "load the model")
            self.clock.timed(Ranks, "join", "meet the other ranks")
            plain = actors.load_protocol

            def load_protocol(spec: Any) -> tuple[Any, Any]:
                cls, options = plain(spec)
                self.clock.timed(cls, "__init__", f"{spec.name}: make the backend")
                return cls, options

            actors.load_protocol = load_protocol
            found = super().start(setup, rank, *meeting)
            self.clock.save(f"worker-{rank}", process=self.up, all=time.perf_counter() - began)
            return found

    class Engine(runtime.EngineActor):
        def __init__(self) -> None:
            super().__init__()
            self.clock, self.up = Clock(), since_process_began()

        async def start(self, setup: Any) -> Any:
            began = time.perf_counter()
            self.clock.imports()
            import rlhf_host.runtimes.ray_actors as actors

            plain = actors.load_protocol

            def load_protocol(spec: Any) -> tuple[Any, Any]:
                cls, options = plain(spec)
                # vLLM is made in a thread of its own, in this method.
                self.clock.timed(cls, "_start" if hasattr(cls, "_start") else "__init__", f"{spec.name}: make the engine")
                return cls, options

            actors.load_protocol = load_protocol
            found = await super().start(setup)
            self.clock.save(f"engine-{os.getpid()}", process=self.up, all=time.perf_counter() - began)
            return found

    runtime.WorkerActor, runtime.EngineActor = Worker, Engine


def measured_run(flags: list[str]) -> None:
    """``rlhf train`` to the end of its first step, in this process."""
    clock, up = Clock(), since_process_began()
    began = time.perf_counter()
    clock.imports()
    from rlhf_host.cli.main import main as rlhf
    from rlhf_host.runtimes import ray as runtime
    from rlhf_host.runtimes.ray_cluster import RayCluster
    from rlhf_host.training.online import OnlineLoop

    instrument()
    clock.timed(RayCluster, "start", "Ray: start the cluster")
    clock.timed(RayCluster, "reserve", "Ray: reserve devices")
    clock.timed(runtime, "_actor", "Ray: ask for processes")
    sync, take_step, wait_all = OnlineLoop._sync, OnlineLoop._take_step, runtime.wait_all
    asked: set[str] = set()

    def wait(references: Any, *names: str) -> Any:
        what = "engines" if names == ("the engines",) else "workers" if names[0] in asked else "processes"
        asked.update(names)
        with clock(f"wait for {what}"):
            return wait_all(references, *names)

    def step(loop: OnlineLoop, number: int) -> Any:
        OnlineLoop._sync = sync  # its second sync counts as the step's
        with clock("first step"):
            found = take_step(loop, number)
        took = time.perf_counter() - began
        clock.save("controller", process=up, other=took - sum(clock.seconds.values()), all=took + up)
        return found

    runtime.wait_all, OnlineLoop._take_step = wait, step
    clock.timed(OnlineLoop, "_sync", "first sync, with its probe")
    rlhf(["train", *flags], standalone_mode=False)


def prepare(folder: Path) -> list[str]:
    """A model and prompts, and the flags of a run with them."""
    from rlhf_host.testing.models import write_tiny_model

    write_tiny_model(folder / "model", hidden=128)
    dice = random.Random(0)
    rows = [{"prompt": f"{dice.randint(1, 9)}+{dice.randint(1, 9)}=", "label": "7"} for _ in range(80)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = {
        "algo": "rloo",
        "reward": "math_verifier",
        "actor.model": folder / "model",
        "data": folder / "data.jsonl",
        "rollout.n": 4,
        "rollout.max-new-tokens": 8,
        "train.batch-size": 8,
        "train.steps": 1,
        "train.threads": 1,
        "checkpoint.final": "false",
        "run-dir": folder / "run",
        "runtime": "ray",
        "ray.num-cpus": 4,
        "ray.num-gpus": 0,
        "ray.object-store-mb": 200,
        "backend": "deepspeed",
        "engine": "vllm",
    }
    return [f"--{name}={value}" for name, value in flags.items()] + ["--placement=actor=2", "--placement=rollout=1"]


def main() -> int:
    if STAMPS in os.environ:
        measured_run(sys.argv[1:])
        return 0
    if sys.argv[1:2] in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        flags = prepare(Path(folder)) + sys.argv[1:]
        stamps = Path(folder) / "stamps"
        stamps.mkdir()
        command = [sys.executable, __file__, *flags]
        environment = {**os.environ, STAMPS: str(stamps), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        found = {path.stem: json.loads(path.read_text()) for path in sorted(stamps.glob("*.json"))}
    if done.returncode or "controller" not in found:
        sys.exit(f"rlhf train failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    for who, seconds in found.items():
        print(who)
        for name, value in seconds.items():
            if value >= 0.05:
                print(f"  {name:32} {value:6.2f} s")
    print(json.dumps({"benchmark": "ray_startup", "flags": sys.argv[1:], "seconds": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
