"""Kills runs at random moments and damages their checkpoints: is the resumed run the one that was left alone?

python scripts/chaos.py                          # 50 kills of the controller per kind of run, 30 damaged checkpoints, Ray: an hour
python scripts/chaos.py --only free --kills 10
python scripts/chaos.py --only ray               # 20 kills and 10 stops of engines and ranks on Ray
python scripts/chaos.py --only ranks --backend fsdp --kills 10  # two ranks on Ray, killed with all their processes

Synchronous runs and those with ``pipeline.schedule fixed`` must give the same metrics and weights, value for value. ``free`` ones
must train on the same tasks in the same steps, and have the same ledger: every draw in it once. In ``passed`` ones draws pass
others, so steps depend on time, and the ledger must have the same draws, each once. A damaged checkpoint must be noticed. The last
line is a JSON object; the exit code is 1 where something differed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import psutil
from rlhf_authoring import write_tiny_model

STEPS = 60
MACHINE = ("time/", "memory/", "engine/", "sync/", "tokens_per_s", "tflops", "mfu")
ON_RAY = [
    *("--runtime", "ray", "--ray.num-cpus", "4", "--ray.num-gpus", "0"),
    *("--ray.object-store-mb", "200", "--ray.temp-dir", "/tmp"),
]
KINDS = {
    "sync": [],
    "fixed": ["--async-depth", "2", "--pipeline.schedule", "fixed"],
    "free": ["--async-depth", "2"],
    "passed": ["--async-depth", "1", "--pipeline.max-staleness", "3"],
    "ranks": [*ON_RAY, "--placement", "actor=2", "--placement", "rollout=1"],
}
REWARD = """
import asyncio


def vowels(text):
    return sum(letter in "aeiou" for letter in text) / 8


async def slow_vowels(text, prompt):
    await asyncio.sleep(0.4 * (int(prompt.split("+")[0]) % 5 == 0))
    return vowels(text)


async def long_vowels(text):
    await asyncio.sleep(2.0)  # so that few steps take long enough
    return vowels(text)
"""
RLHF = [sys.executable, "-m", "rlhf_host.cli.main"]


class Runs:
    """Runs of one kind in a folder of their own."""

    def __init__(self, folder: Path, more: Sequence[str], steps: int = STEPS, reward: str = "vowels"):
        self.folder = folder
        folder.mkdir()
        write_tiny_model(folder / "model")
        rows = [{"prompt": f"{i}+{7 * i % 100}=", "label": str(i + 7 * i % 100)} for i in range(64)]
        (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "vowels.py").write_text(REWARD)
        self.flags = ["train", "--algo", "rloo", "--reward", f"{folder}/vowels.py:{reward}", "--actor.model", f"{folder}/model"]
        self.flags += ["--data", f"{folder}/data.jsonl", "--eval.data", f"{folder}/data.jsonl", "--eval.every", "10"]
        self.flags += [
            "--train.steps",
            str(steps),
            "--train.batch-size",
            "4",
            "--rollout.n",
            "4",
            "--rollout.max-new-tokens",
            "24",
        ]
        self.flags += [
            "--checkpoint.every",
            "3",
            "--checkpoint.keep",
            "3",
            "--trajectories.max-per-step",
            "0",
            "--actor.lr",
            "1e-3",
        ]
        self.flags += ["--trajectories.max-per-step", "0", "--train.threads", "1", "--kernels", "none", *more]

    def start(self, name: str) -> subprocess.Popen[bytes]:
        """The run, begun or resumed."""
        run = self.folder / name
        command = ["train", "--resume", str(run)] if (run / "config.yaml").exists() else [*self.flags, "--run-dir", str(run)]
        return subprocess.Popen([*RLHF, *command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=self.folder)

    def finish(self, name: str) -> str:
        """Go on to the end. What it wrote to standard error."""
        while True:
            process = self.start(name)
            _, err = process.communicate()
            if not _ray_was_late(process, err):
                return self.ended(name, process, err)

    def ended(self, name: str, process: subprocess.Popen[bytes], err: bytes) -> str:
        """Raises ``SystemExit`` for a run that failed. One that was killed behind its last checkpoint is finished."""
        text = err.decode(errors="replace")
        if process.returncode and "is finished at step" not in text:
            raise SystemExit(f"{name} ended with exit code {process.returncode}:\n{text[-3000:]}")
        return text

    def metrics(self, name: str) -> list[dict[str, Any]]:
        rows = map(json.loads, (self.folder / name / "metrics.jsonl").read_text().splitlines())
        return [{key: value for key, value in row.items() if not key.startswith(MACHINE)} for row in rows]

    def weights(self, name: str) -> list[bytes]:
        return [file.read_bytes() for file in sorted((self.folder / name / "model").glob("*.safetensors"))]

    def tasks(self, name: str) -> dict[int, list[str]]:
        """Step → prompts of its groups, in order."""
        found: dict[int, dict[str, str]] = {}
        for file in sorted((self.folder / name / "trajectories").glob("train-*.jsonl")):
            for row in map(json.loads, file.read_text().splitlines()):
                found.setdefault(row["step"], {}).setdefault(row["group_id"], row["prompt"])
        return {step: list(groups.values()) for step, groups in found.items()}

    def ledger(self, name: str) -> list[list[list[Any]]]:
        """Each step's draws, and what became of them."""
        rows = [json.loads(line) for line in (self.folder / name / "ledger.jsonl").read_text().splitlines()]
        numbers = [draw[0] for row in rows for draw in row["draws"]]
        if sorted(numbers) != [*range(len(numbers))] or [row["step"] for row in rows] != [*range(1, len(rows) + 1)]:
            raise SystemExit(f"the ledger of {name} does not have every draw once")
        return [row["draws"] for row in rows]

    def in_order(self, name: str) -> bool:
        """Whether steps have the draws in their order."""
        numbers = [draw[0] for draws in self.ledger(name) for draw in draws]
        return numbers == sorted(numbers)

    def same(self, kind: str, name: str) -> bool:
        """Whether it is the run that was left alone."""
        if kind == "passed":
            return sorted(chain(*self.ledger(name))) == sorted(chain(*self.ledger("whole")))
        if self.ledger(name) != self.ledger("whole"):
            return False
        if kind in ("sync", "fixed", "ranks"):
            return self.metrics(name) == self.metrics("whole") and self.weights(name) == self.weights("whole")
        return self.tasks(name) == self.tasks("whole") and len(self.metrics(name)) == len(self.metrics("whole"))


def controller(folder: Path, kind: str, asked: argparse.Namespace, rng: random.Random) -> dict[str, Any]:
    """Kill -9 of the run's process, and of those below it on Ray, again and again, also while it starts."""
    more = [*KINDS[kind], *(["--backend", asked.backend] if kind == "ranks" else [])]
    runs = Runs(folder / kind, more, asked.steps, "slow_vowels" if kind == "passed" else "vowels")
    kills: int = asked.kills
    started = time.monotonic()
    runs.finish("whole")
    length = time.monotonic() - started
    done = different = finished = passed = 0
    name = "killed-0"
    while done < kills:
        process = runs.start(name)
        try:
            if kind == "ranks" and rng.random() < 0.7:  # most of its time is its start
                _after_steps(process, runs.folder / name, rng.randint(1, 3))
                process.wait(rng.uniform(0.0, 1.0))
            else:
                process.wait(rng.uniform(0.3, 1.0) * length)
        except subprocess.TimeoutExpired:
            below = _below(process.pid) if kind == "ranks" else []
            process.kill()
            for one in below:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            process.communicate()
            done += 1
            print(f"{kind}: kill {done} of {name}, after step {_step(runs.folder / name)}", file=sys.stderr, flush=True)
            continue
        _, err = process.communicate()
        if _ray_was_late(process, err):
            continue
        runs.ended(name, process, err)
        different += not runs.same(kind, name)
        passed += not runs.in_order(name)
        finished += 1
        name = f"killed-{finished}"
    if (runs.folder / name).exists():
        runs.finish(name)
        different += not runs.same(kind, name)
        passed += not runs.in_order(name)
        finished += 1
    print(f"{kind}: {kills} kills in {finished} runs, of which {different} differ; draws were passed in {passed}", flush=True)
    return {f"{kind}/kills": kills, f"{kind}/runs": finished, f"{kind}/different": different, f"{kind}/passed": passed}


def damage(folder: Path, count: int, rng: random.Random) -> dict[str, Any]:
    """One byte changed, or a file cut, in the newest checkpoint: said aloud, and an older one gives the same run."""
    runs = Runs(folder / "damage", KINDS["fixed"], steps=12)
    runs.finish("whole")
    silent = different = 0
    for number in range(count):
        name = f"damaged-{number}"
        process = runs.start(name)
        while not (runs.folder / name / "checkpoints/step-000009").exists() and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        newest = sorted((runs.folder / name / "checkpoints").glob("step-*"))[-1]
        file = rng.choice([path for path in sorted(newest.rglob("*")) if path.is_file() and path.stat().st_size])
        place = rng.randrange(file.stat().st_size)
        if number % 3:
            content = bytearray(file.read_bytes())
            content[place] ^= 1 << rng.randrange(8)
            file.write_bytes(content)
        else:
            with file.open("r+b") as cut:
                cut.truncate(place)
        said = runs.finish(name)
        silent += "is damaged" not in said
        different += not runs.same("fixed", name)
        shutil.rmtree(runs.folder / name)
    print(f"damage: {count} checkpoints, {silent} loaded in silence, {different} runs differ", flush=True)
    return {"damage/checkpoints": count, "damage/silent": silent, "damage/different": different}


def ray(folder: Path, kills: int, stops: int, steps: int, rng: random.Random) -> dict[str, Any]:
    """Kill or stop engines and ranks of a run on Ray. A rank's end is the run's, which is then resumed."""
    more = [*ON_RAY, "--placement", "actor=1", "--placement", "rollout=2", "--ray.stall-s", "10", "--async-depth", "1"]
    runs = Runs(folder / "ray", more, steps, "long_vowels")
    runs.finish("whole")
    done = {"kill": 0, "stop": 0, "resumed": 0}
    process, begun = runs.start("hit"), 0
    while done["kill"] < kills or done["stop"] < stops:
        try:
            process.wait(rng.uniform(2.0, 6.0))
        except subprocess.TimeoutExpired:
            workers = _workers(process.pid)
            if workers and begun < _step(runs.folder / "hit") < steps - 5:  # it is past its start
                what = "kill" if done["kill"] < kills else "stop"
                rng.choice(workers).send_signal(signal.SIGKILL if what == "kill" else signal.SIGSTOP)
                done[what] += 1
            continue
        process.communicate()
        if process.returncode == 0:
            break
        done["resumed"] += 1
        begun = _step(runs.folder / "hit")
        process = runs.start("hit")
    if process.returncode is None:
        process.communicate()
    if process.returncode:
        runs.finish("hit")
    different = not runs.same("free", "hit")
    print(f"ray: {done}, in {steps} steps; the tasks {'differ' if different else 'are the same'}", flush=True)
    return {f"ray/{name}": count for name, count in done.items()} | {"ray/different": int(different)}


def _below(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)  # type: ignore[no-any-return]
    except psutil.NoSuchProcess:
        return []


def _workers(pid: int) -> list[psutil.Process]:
    """Ray's actors below a process."""
    try:
        return [one for one in _below(pid) if "".join(one.cmdline()).startswith("ray::")]
    except psutil.NoSuchProcess:
        return []


def _ray_was_late(process: subprocess.Popen[bytes], err: bytes) -> bool:
    """Returns True if the machine was so busy that Ray did not start in its 30 seconds: nothing of the run was."""
    return process.returncode == 2 and b"cannot start Ray on this machine" in err


def _after_steps(process: subprocess.Popen[bytes], run: Path, steps: int) -> None:
    """Waits until a run has made some more steps, or has ended."""
    begun = _step(run)
    while _step(run) < begun + steps and process.poll() is None:
        time.sleep(0.05)


def _step(run: Path) -> int:
    file = run / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[*KINDS, "damage", "ray"], nargs="+", default=[*KINDS, "damage", "ray"])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--backend", default="fsdp", help="of the kind ranks")
    parser.add_argument("--damaged", type=int, default=30)
    parser.add_argument("--ray-kills", type=int, default=20)
    parser.add_argument("--ray-stops", type=int, default=10)
    parser.add_argument("--ray-steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    rng, result = random.Random(asked.seed), dict[str, Any]()
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        for kind in asked.only:
            if kind in KINDS:
                result |= controller(folder, kind, asked, rng)
            elif kind == "damage":
                result |= damage(folder, asked.damaged, rng)
            else:
                result |= ray(folder, asked.ray_kills, asked.ray_stops, asked.ray_steps, rng)
    print(json.dumps(result))
    sys.exit(any(value for name, value in result.items() if name.endswith(("/different", "/silent"))))


if __name__ == "__main__":
    main()
