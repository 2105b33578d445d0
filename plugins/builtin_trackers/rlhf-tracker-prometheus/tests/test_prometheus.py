"""What a reading of the port gives, read by the parser of Prometheus' own client."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from rlhf_authoring import learner
from rlhf_authoring.trackers import ODD_METRICS, SmallRun, logged_metrics
from rlhf_tracker_prometheus import Prometheus

import rlhf_host
from rlhf_host import Outcome, PluginError
from rlhf_host.distributed import reserved

OWN = {"run_info", "run_state", "run_start_timestamp_seconds", "last_step_timestamp_seconds", "step", "last_eval_step"}
OWN |= {"steps_total", "planned_steps"}
ZERO = {"steps", "episodes", "tokens", "groups_trained", "groups_dropped", "tasks_drawn", "unjudged_answers", "updates_skipped"}
ZERO |= {"weight_sync_bytes", "engine_preemptions"}

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def read(address: str) -> str:
    with urllib.request.urlopen(address, timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        return answer.read().decode()


def parsed(text: str) -> Samples:
    """(name without ``rlhf_``, labels but the run's) → value; no sample is there twice."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("run") is not None
            key = (sample.name.removeprefix("rlhf_"), frozenset(labels.items()))
            assert sample.name.startswith("rlhf_")
            assert key not in found
            found[key] = sample.value
    return found


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


class Started:
    """A tracker that has begun, and where it listens."""

    def __init__(
        self, small: SmallRun, caplog: Any, resume_step: int | None = None, roles: tuple[str, ...] = (), **options: Any
    ):
        self.tracker = Prometheus(Prometheus.Options(**{"port": 0, **options}))
        context = small.context(resume_step)
        context.roles, context.steps = dict.fromkeys(roles), 9
        with caplog.at_level(logging.WARNING):
            caplog.clear()
            self.tracker.run_started(context)
        self.address = caplog.messages[-1].removeprefix("metrics for Prometheus: ")

    def read(self) -> Samples:
        return parsed(read(self.address))

    def finish(self, status: str = "finished") -> float:
        """Ends the run; returns the seconds that it took."""
        began = time.monotonic()
        waits = self.tracker.run_finished(Outcome(status, 1))  # type: ignore[arg-type]
        if waits is not None:
            asyncio.run(waits)  # type: ignore[arg-type]
        return time.monotonic() - began


@pytest.fixture
def started(tmp_path, caplog) -> Iterator[Any]:
    made: list[Started] = []

    def start(**options: Any) -> Started:
        made.append(Started(SmallRun(tmp_path), caplog, **options))
        return made[-1]

    yield start
    for each in made:
        each.tracker.run_finished(Outcome("interrupted", 1))


# --- names, labels and units ----------------------------------------------------------------------


def test_metrics_have_labels_and_the_units_of_prometheus(started):
    run = started(roles=("actor", "critic"))
    run.tracker.log_metrics(
        3,
        {
            "reward/mean": 0.5,
            "reward/std": 0.25,
            "reward/math": 0.75,
            "loss": -1.0,
            "critic/loss": 2.0,
            "loss/policy": 3.0,
            "critic/value": 4.0,
            "time/step": 1.5,
            "time/rollout": 1.0,
            "memory/rss_gb": 2.0,
            "sync/gb": 0.5,
            "tokens": 30.0,
            "rollout/finished": 7.0,
            "rollout/failed": 1.0,
            "rollout/failed/tool:TimeoutError": 1.0,
            "engine/kv_use": 0.5,
            "engine/queue": 6.0,
            "gpu/0/power_w": 300.0,
            "gpu/box:1/power_w": 250.0,
            "my/own": 8.0,
            "tflops": 2.0,
            "eval/pass@4": 0.5,
            "eval/pass@4/stderr": 0.1,
            "eval/gsm8k/pass@1": 0.25,
            "eval/reward/mean": 0.4,
            "eval/x": 1.0,
        },
    )
    found = run.read()
    expected = {
        ("reward", "stat", "mean"): 0.5,
        ("reward", "stat", "std"): 0.25,
        ("reward_source_mean", "source", "math"): 0.75,
        ("loss", "role", "actor"): -1.0,
        ("loss", "role", "critic"): 2.0,
        ("metric", "metric", "critic/value"): 4.0,
        ("phase_duration_seconds", "phase", "rollout"): 1.0,
        ("memory_peak_bytes", "kind", "rss"): 2e9,
        ("episodes_total", "result", "finished"): 7.0,
        ("episodes_total", "result", "failed"): 1.0,
        ("episode_failures_total", "cause", "tool:TimeoutError"): 1.0,
        ("engine_metric", "metric", "queue"): 6.0,
        ("gpu_power_watts", "device", "0"): 300.0,
        ("gpu_power_watts", "device", "box:1"): 250.0,
        ("metric", "metric", "my/own"): 8.0,
        ("eval_metric", "metric", "x"): 1.0,
    }
    assert {(name, label, said): value(found, name, **{label: said}) for name, label, said in expected} == expected
    plain = {"step_duration_seconds": 1.5, "weight_sync_bytes_total": 5e8, "tokens_total": 30.0, "step": 3.0}
    plain |= {"engine_kv_cache_usage_ratio": 0.5, "model_flops_per_second": 2e12, "planned_steps": 9.0, "last_eval_step": 3.0}
    assert {name: value(found, name) for name in plain} == plain
    assert value(found, "loss_term", role="actor", term="policy") == 3.0
    assert value(found, "eval_pass_ratio", data="", k="4", stat="") == 0.5
    assert value(found, "eval_pass_ratio", data="", k="4", stat="stderr") == 0.1
    assert value(found, "eval_pass_ratio", data="gsm8k", k="1", stat="") == 0.25
    assert value(found, "eval_reward", data="", stat="mean") == 0.4


def test_every_number_of_a_row_is_there_once_whatever_its_name(started):
    run = started(run_name='a "run"\n\ud800')
    odd = {
        **ODD_METRICS,
        "tokens": math.nan,
        "rollout/drawn": -1.0,
        "a\nb\\c": 1.0,
        "half\ud800": 2.0,
        "actor/loss": 3.0,
        "loss": 4.0,
    }
    run.tracker.log_metrics(1, {**odd, "none": None, "list": [1, 2]})
    found = run.read()
    own = {key: number for key, number in found.items() if key[0] not in OWN and key[0].removesuffix("_total") not in ZERO}
    numbers = [number for name, number in odd.items() if name != "text"]
    assert sorted(map(str, own.values())) == sorted(map(str, numbers))
    # What would spoil a counter for good is shown as what it is.
    assert math.isnan(value(found, "metric", metric="tokens"))
    assert (value(found, "tokens_total"), value(found, "tasks_drawn_total")) == (0.0, 0.0)
    assert {value(found, "loss", role="actor"), value(found, "metric", metric="loss")} == {3.0, 4.0}


def test_a_gauge_that_the_last_step_did_not_measure_is_gone_and_an_evaluation_stays(started):
    run = started()
    run.tracker.log_metrics(0, {"eval/loss": 0.5})
    run.tracker.log_metrics(1, {"loss": 1.0, "time/checkpoint": 2.0, "tokens": 10.0})
    run.tracker.log_metrics(2, {"loss": 3.0, "tokens": 5.0})
    found = run.read()
    assert (value(found, "eval_loss", data=""), value(found, "last_eval_step"), value(found, "loss", role="actor")) == (
        0.5,
        0,
        3,
    )
    assert ("phase_duration_seconds", frozenset({("phase", "checkpoint")})) not in found
    assert (value(found, "tokens_total"), value(found, "steps_total"), value(found, "step")) == (15.0, 2.0, 2.0)


def test_a_resumed_run_goes_on_with_its_step_and_counts_anew(started):
    found = started(resume_step=4).read()
    assert (value(found, "step"), value(found, "steps_total"), value(found, "tokens_total")) == (4.0, 0.0, 0.0)


# --- hanging, ending, listening -------------------------------------------------------------------


def test_the_time_of_the_last_step_stands_still_while_nothing_happens(started):
    before = time.time()
    run = started()
    began = value(run.read(), "last_step_timestamp_seconds")
    assert before <= began <= time.time()
    assert value(run.read(), "last_step_timestamp_seconds") == began
    run.tracker.log_metrics(1, {"loss": 1.0})
    assert value(run.read(), "last_step_timestamp_seconds") > began == value(run.read(), "run_start_timestamp_seconds")


@pytest.mark.parametrize("status", ["finished", "failed"])
def test_who_reads_regularly_reads_the_end(started, status):
    run = started()
    seen: list[Samples] = []

    def reads() -> None:
        for _ in range(2):
            time.sleep(0.2)
            seen.append(run.read())
        time.sleep(0.3)
        seen.append(run.read())

    reader = threading.Thread(target=reads)
    reader.start()
    time.sleep(0.55)
    assert run.finish(status) < 1.0
    reader.join()
    states = [{state: value(each, "run_state", state=state) for state in ("running", status)} for each in seen]
    assert states == [{"running": 1, status: 0}, {"running": 1, status: 0}, {"running": 0, status: 1}]
    with pytest.raises(OSError, match="refused"):
        run.read()


def test_an_end_waits_for_nobody_who_has_gone_or_who_looked_once(started):
    once, gone, interrupted, given_up = (started(linger_s=0.3 if number == 3 else 60) for number in range(4))
    once.read()
    for each in (gone, interrupted, given_up):
        each.read()
        time.sleep(0.1)
        each.read()
    assert interrupted.finish("interrupted") < 0.2
    assert given_up.finish() < 0.5
    time.sleep(0.3)
    assert once.finish() + gone.finish() < 0.3


def test_a_port_that_is_taken_is_named_with_what_to_do(started):
    run = started()
    port = int(run.address.split(":")[-1].removesuffix("/metrics"))
    with pytest.raises(
        PluginError, match=f"cannot listen at 127.0.0.1 port {port}: .*in use; .* --prometheus.port PORT, and 0"
    ):
        started(port=port)
    with pytest.raises(PluginError, match=r"cannot listen at no\.such\.host port 0"):
        started(host="no.such.host")


def test_it_listens_on_the_loopback_alone(started):
    run = started()
    assert run.address.startswith("http://127.0.0.1:")
    port = int(run.address.split(":")[-1].removesuffix("/metrics"))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    bound = [row[1] for row in rows if row[3] == "0A" and row[1].endswith(f":{port:04X}")]
    assert bound == [f"0100007F:{port:04X}"]


# --- whole runs -----------------------------------------------------------------------------------


def test_a_run_is_read_while_it_goes_on(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    readings: list[Samples] = []
    size = {"train.steps": 3, "train.batch_size": 4, "rollout.n": 2, "data.max_samples": 64, "eval.data.arithmetic.count": 8}

    def follow() -> None:
        while not (addresses := [text for text in caplog.messages if text.startswith("metrics for")]):
            time.sleep(0.01)
        try:
            while True:
                readings.append(parsed(read(addresses[0].split()[-1])))
                time.sleep(0.1)
        except OSError:
            pass

    reader = threading.Thread(target=follow)
    reader.start()
    with caplog.at_level(logging.WARNING):
        rlhf_host.train(algo=learner.Learner(), reward=learner.right_answer, run_dir="first", prometheus={"port": 0}, **size)
    reader.join()
    rows = logged_metrics(tmp_path / "first")
    assert {value(each, "step") for each in readings} >= {0.0, 3.0}
    assert {value(each, "run_state", state="running") for each in readings} == {0.0, 1.0}
    last = readings[-1]
    assert value(last, "run_state", state="finished") == 1
    assert value(last, "reward", stat="mean") == rows[3]["reward/mean"]
    assert value(last, "step_duration_seconds") == rows[3]["time/step"]
    assert value(last, "tokens_total") == sum(row.get("tokens", 0) for row in rows.values())
    assert value(last, "run_info", **_info(last))


def _info(samples: Samples) -> dict[str, str]:
    (labels,) = (dict(labels) for name, labels in samples if name == "run_info")
    assert labels["engine"] == "transformers"
    return labels


def test_a_taken_port_ends_the_command_before_anything_is_trained(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        done = SmallRun(tmp_path).train("--train.steps", "2", "--prometheus.port", str(port), code=2)
    assert f"cannot listen at 127.0.0.1 port {port}: Address already in use; another port is --prometheus.port" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_killed_run_goes_on_on_the_same_port(tmp_path):
    small = SmallRun(tmp_path)
    with reserved("127.0.0.1") as place:
        port = str(place.getsockname()[1])
        small.train("--train.steps", "5", "--prometheus.port", port, KILL_AFTER="3", code=-9)
        done = small.rlhf("train", "--resume", "run", "--train.steps", "5")
    assert f"metrics for Prometheus: http://127.0.0.1:{port}/metrics\n" in done.stderr
    assert json.loads((small.run_dir / "run.json").read_text())["status"] == "finished"
