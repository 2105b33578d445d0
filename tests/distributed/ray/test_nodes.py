"""PPO with actor, critic, reference and reward model over three machines; engines are killed, machines are lost."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rlhf_authoring.models import tiny_tokenizer, write_tiny_model

from .clusters import held

pytest.importorskip("ray")

pytestmark = pytest.mark.timeout(1200)

CLUSTER = """
import os, sys
from ray.cluster_utils import Cluster

def machine(cpus):
    return {"num_cpus": cpus, "num_gpus": 0, "object_store_memory": 100 * 2**20, "node_ip_address": "127.0.0.1"}

def hosts(node, pid):
    raylet, = node.all_processes["raylet"]
    return raylet.process.pid == int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])

head = dict(machine(0), include_dashboard=False, temp_dir=os.environ["RAY_TMPDIR"])
cluster = Cluster(initialize_head=True, head_node_args=head)
for _ in range(3):
    cluster.add_node(**machine(2))
print(cluster.address, flush=True)
for line in sys.stdin:
    command, _, pid = line.strip().partition(" ")
    if command == "add":
        cluster.add_node(**machine(2))
    else:
        cluster.remove_node(next(node for node in cluster.worker_nodes if hosts(node, pid)), allow_graceful=False)
    print("done", flush=True)
cluster.shutdown()
"""

FORGETFUL = '''"""A sync that loads the model's first weights into an engine that came back, as if nothing had been trained."""
import asyncio
from pathlib import Path
from safetensors.torch import load_file
from rlhf_host.distributed.sync.plugin import Broadcast

class Forgetful(Broadcast):
    class Options(Broadcast.Options):
        trap: Path
        first: Path

    known = ()

    async def transfer(self, source, targets, version):
        if len(targets) == 1:
            await asyncio.sleep(3)  # the other engine is being started: the steps leave it the cores
        new = [target for target in targets if target.engine not in self.known]
        if self.known and new and self.options.trap.exists():
            self.options.trap.unlink()
            for target in new:
                await target.engine.run("test_forgetful:load_first", file=str(self.options.first), version=version)
            targets = [target for target in targets if target not in new]
        if targets:
            await super().transfer(source, targets, version)
        self.known = (*self.known, *(target.engine for target in new))

def load_first(loader, file, version):
    loader.load(iter([list(load_file(file).items())]), version)
'''


@dataclass
class Machines:
    """A head without CPUs, where the controller is, and three machines of two CPUs each."""

    address: str
    environment: dict[str, str]
    process: subprocess.Popen[str]

    def add(self) -> None:
        self._ask("add")

    def remove(self, pid: int) -> None:
        """The machine on which this process is."""
        self._ask(f"remove {pid}")

    def processes(self, kind: str) -> list[int]:
        """Actors of this class, by the title that Ray gives their processes."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    title, environment = (entry / "cmdline").read_text(), (entry / "environ").read_text()
                except OSError:
                    continue
                if kind in title and self.environment["RAY_AUTH_TOKEN"] in environment:
                    found.append(int(entry.name))
        return found

    def _ask(self, command: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"


@pytest.fixture(scope="module")
def forgetful(tmp_path_factory) -> Path:
    """A directory that, on the path, is an installed distribution with the sync plugin above."""
    root = tmp_path_factory.mktemp("forgetful")
    about = root / "test_forgetful-1.0.dist-info"
    about.mkdir()
    (root / "test_forgetful.py").write_text(FORGETFUL)
    (about / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: test-forgetful\nVersion: 1.0\nRequires-Dist: rlhf-host>=0.10,<0.11\n"
    )
    (about / "entry_points.txt").write_text("[rlhf.weight_sync]\nforgetful = test_forgetful:Forgetful\n")
    return root


@pytest.fixture(scope="module")
def machines(forgetful) -> Iterator[Machines]:
    path = os.pathsep.join(filter(None, [str(forgetful), os.environ.get("PYTHONPATH", "")]))
    with held(CLUSTER, PYTHONPATH=path) as (process, ours, address):
        yield Machines(address, ours, process)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, Path]:
    """The policy, with the narrowest attention heads that vLLM serves on CPUs; and a reward model."""
    from transformers import AutoModelForSequenceClassification

    policy = write_tiny_model(tmp_path_factory.mktemp("policy"), hidden=128)
    plain = write_tiny_model(tmp_path_factory.mktemp("plain"), seed=1)
    judge = AutoModelForSequenceClassification.from_pretrained(plain, num_labels=1)
    made = tmp_path_factory.mktemp("judge")
    judge.save_pretrained(made)
    tiny_tokenizer().save_pretrained(made)
    return policy, made


@dataclass
class Run:
    """A run under way, seen from outside."""

    process: Any
    directory: Path
    said: Path

    @property
    def err(self) -> str:
        return self.said.read_text()

    def rows(self) -> list[dict]:
        file = self.directory / "metrics.jsonl"
        return (
            [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
            if file.exists()
            else []
        )

    def until(self, done: Callable[[], object]) -> None:
        deadline = time.monotonic() + 300
        while not done():
            assert self.process.poll() is None, self.err
            assert time.monotonic() < deadline, self.err
            time.sleep(0.02)

    def steps(self, more: int) -> None:
        """Wait for so many more."""
        wanted = len(self.rows()) + more
        self.until(lambda: len(self.rows()) >= wanted)

    def wait(self) -> int:
        return self.process.wait(timeout=120)


def cpu_seconds(pid: int) -> float:
    """That the process has computed."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def ppo(rlhf, machines: Machines, models: tuple[Path, Path], prompts: Path, directory: Path, *flags: object) -> Iterator[Run]:
    policy, judge = models
    common = {
        "algo": "ppo",
        "reward": "reward_model",
        "reward.reward_model.model": judge,
        "reward.reward_model.template": "same_tokens",
        "kl.coef": "0.01",
        "actor.model": policy,
        "actor.device": "cpu",
        "actor.lr": "1e-3",
        "data": prompts,
        "train.batch-size": "4",
        "train.steps": "100000",
        "train.threads": "1",
        "runtime": "ray",
        "ray.address": machines.address,
        "run-dir": directory / "run",
    }
    command = ["train", *(str(part) for name, value in common.items() for part in (f"--{name}", value)), *map(str, flags)]
    path = os.pathsep.join([machines.environment["PYTHONPATH"], rlhf.environment["PYTHONPATH"]])
    said = directory / "err.txt"
    with (directory / "out.txt").open("w") as out, said.open("w") as err:
        environment = {**rlhf.environment, **machines.environment, "PYTHONPATH": path}
        process = rlhf.begin(command, environment, stdout=out, stderr=err)
    try:
        yield Run(process, directory / "run", said)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def check_episodes(run: Run, n: int, tasks: int = 24, per_step: int = 4) -> None:
    """Every prompt of every epoch was sampled ``n`` times, and none of it is there twice."""
    seen: dict[str, list[int]] = {}
    for row in run.rows():
        lines = (run.directory / "trajectories" / f"train-step-{row['step']:06d}.jsonl").read_text().splitlines()
        found = [json.loads(line) for line in lines]
        groups: dict[str, list[int]] = {}
        for one in found:
            groups.setdefault(one["prompt"], []).append(one["sample"])
        assert len({one["episode_id"] for one in found}) == len(found) == per_step * n
        assert sorted(map(sorted, groups.values())) == [list(range(n))] * per_step
        for prompt in groups:
            seen.setdefault(prompt, []).append(row["step"])
    epochs = len(run.rows()) * per_step // tasks
    for steps in seen.values():
        assert len(steps) - epochs in (0, 1)
        assert all((step - 1) * per_step // tasks == epoch for epoch, step in enumerate(steps))


def test_ppo_over_three_machines_survives_vllm_engines_that_are_killed(rlhf, machines, models, prompts, tmp_path):
    pytest.importorskip("vllm")
    trap = tmp_path / "trap"
    with ppo(
        *(rlhf, machines, models, prompts, tmp_path),
        *("--placement", "actor+reference=2x1", "--placement", "critic+reward=1", "--placement", "rollout=2:spread"),
        *("--engine", "vllm", "--rollout.n", "8", "--rollout.max-new-tokens", "128", "--ray.max-restarts", "20"),
        *("--sync", "forgetful", "--sync.trap", trap, "--sync.first", models[0] / "model.safetensors"),
    ) as run:
        died, back = "died; it is started again", r"has the weights of version (\d+)"
        refused = r"cannot serve: engine \d does not have the trainer's weights of version (\d+)"

        def lines(wanted: str) -> list[str]:
            return [line for line in run.err.splitlines() if re.search(wanted, line)]

        def kill_one_at_work() -> None:
            """And another when it had nothing to do just then; all that died are up again in the end."""
            at_work = r"died; .* its [1-9]\d* requests go to others"
            before = len(lines(at_work))
            while len(lines(at_work)) == before:
                dead, engine = len(lines(died)), machines.processes("EngineActor")[0]
                run.steps(1)  # the next rollout begins at once
                begun = cpu_seconds(engine)
                run.until(lambda: cpu_seconds(engine) > begun + 0.1)  # noqa: B023
                os.kill(engine, signal.SIGKILL)
                run.until(lambda: len(lines(back)) > dead)  # noqa: B023

        run.steps(3)
        kill_one_at_work()
        # The next to come back is given the model's first weights: its probe tells, and it does not serve.
        trap.touch()
        kill_one_at_work()
        run.steps(2)
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130, run.err
        for line in lines(back):
            assert float(re.search(r"log-probabilities of a probe within (\S+) of the trainer's", line)[1]) < 1e-4
        (caught,) = lines(refused)
        after = [int(re.search(back, line)[1]) for line in lines(back)]
        assert int(re.search(refused, caught)[1]) + 1 in after  # what the next sync brought is the run's
        for number, row in enumerate(run.rows(), start=1):
            assert row["step"] == row["version"] == number
            assert row["rollout/groups"] == 4
            assert row["rollout/failed"] == row["rollout/unjudged"] == 0
            assert row["mismatch/max"] < 1e-4
        check_episodes(run, n=8)


def test_a_lost_machine_costs_an_engine_for_a_while_and_a_lost_rank_the_run(rlhf, machines, models, prompts, tmp_path):
    with ppo(
        *(rlhf, machines, models, prompts, tmp_path),
        *("--placement", "actor+critic+reference+reward=2:strict_pack", "--placement", "rollout=2:strict_spread"),
        *("--rollout.n", "4", "--rollout.max-new-tokens", "32", "--checkpoint.every", "2"),
    ) as run:
        run.steps(3)
        machines.remove(machines.processes("EngineActor")[0])
        # The other machines have the ranks and the other engine, from which this one is to stay apart.
        run.until(lambda: "no machine has room for it" in run.err)
        assert "the run goes on with 1 of 2 until one joins" in run.err
        run.steps(2)
        machines.add()
        run.until(lambda: "has the weights of version" in run.err)
        run.steps(2)
        assert len(machines.processes("EngineActor")) == 2
        machines.remove(machines.processes("WorkerActor")[0])
        assert run.wait() == 1, run.err
        for row in run.rows():
            assert row["rollout/failed"] == row["rollout/unjudged"] == 0
            assert row["mismatch/max"] < 1e-4
        check_episodes(run, n=4)
        last = max((run.directory / "checkpoints").glob("step-*"))
        *_, end = run.err.splitlines()
        assert re.match(r"Error: .* is lost \(.*\); continue from ", end)
        assert f"; continue from {last} with " in end
        assert end.endswith(f"rlhf train --resume {run.directory}")
        assert "Traceback" not in run.err
        assert "Error: " not in run.err.replace(end, "")
