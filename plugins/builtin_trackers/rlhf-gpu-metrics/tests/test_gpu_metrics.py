"""What becomes of NVML's numbers, with a stand-in for NVML; and machines without it."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
from rlhf_authoring.trackers import SmallRun, logged_metrics
from rlhf_gpu_metrics import GPUMetrics
from rlhf_gpu_metrics.watch import Devices, Watch

from rlhf_host import UserError

STAND_IN = str(Path(__file__).with_name("stand_in"))
ALONE = {"CUDA_VISIBLE_DEVICES": "0,1", "PYTHONPATH": os.pathsep.join(filter(None, (STAND_IN, os.environ.get("PYTHONPATH"))))}


def extension(**options: float) -> GPUMetrics:
    return GPUMetrics(GPUMetrics.Options(**options))


def test_a_step_has_the_mean_and_the_most_of_what_was_seen(nvml):
    watch = Watch(Devices(), every_s=60)
    try:
        watch._look()
        assert watch.take() == {
            "gpu/0/utilisation": 0.4,
            "gpu/0/power_w": 200.0,
            "gpu/0/memory_gb": 3.0,
            "gpu/0/temperature_c": 60.0,
            "gpu/1/utilisation": 0.6,
            "gpu/1/power_w": 50.0,
            "gpu/1/memory_gb": 3.0,
            "gpu/1/temperature_c": 61.0,
        }
        # A step shorter than a look has what is there now.
        assert watch.take("box:")["gpu/box:0/power_w"] == 300.0
    finally:
        watch.close()
    assert nvml.inits == 0


def test_it_looks_by_itself(nvml):
    watch = Watch(Devices(), every_s=0.05)
    time.sleep(0.4)
    watch.close()
    assert 4 <= nvml.looks[0] <= 9
    seen = nvml.looks[0]
    time.sleep(0.15)
    assert nvml.looks[0] == seen


@pytest.mark.parametrize(
    ("visible", "chosen"),
    [(None, ["0", "1"]), ("1", ["1"]), ("1,0", ["0", "1"]), ("GPU-111", ["1"]), (" 0 ", ["0"])],
)
def test_gpus_are_those_that_cuda_sees(visible, chosen):
    devices = Devices(visible)
    assert list(devices.handles) == chosen
    devices.close()


@pytest.mark.parametrize(
    ("visible", "gpus", "problem"),
    [
        ("", "2", r"NVML sees no GPU here with CUDA_VISIBLE_DEVICES=:"),
        ("7", "2", r"NVML sees no GPU here with CUDA_VISIBLE_DEVICES=7: leave out --with gpu_metrics"),
        (None, "0", r"NVML sees no GPU here: leave out"),
        ("MIG-1", "2", r"no utilisation and power of parts of a GPU \(MIG\)"),
        (None, "none", r"there is no NVML here, which comes with NVIDIA's driver \(NVML Shared Library Not Found\)"),
    ],
)
def test_nothing_to_watch_is_refused_before_the_run(monkeypatch, nvml, visible, gpus, problem):
    monkeypatch.setenv("GPUS", gpus)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(UserError, match=problem):
        extension().check_run({}, {})
    assert nvml.inits == 0


def test_a_missing_package_is_named_with_its_install_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(UserError, match="pip install nvidia-ml-py"):
        extension().check_run({}, {})


def test_what_a_gpu_does_not_say_is_left_out_and_told_once(nvml, caplog, monkeypatch):
    monkeypatch.setattr(nvml, "SILENT", {"utilisation"})
    watch = Watch(Devices("0"), every_s=60)
    watch._look()
    assert watch.take().keys() == {"gpu/0/power_w", "gpu/0/memory_gb", "gpu/0/temperature_c"}
    watch.close()
    assert caplog.messages == ["gpu_metrics: GPU 0 does not say its utilisation: Not Supported"]


def test_every_step_of_a_run_has_them_and_they_change_nothing_else(tmp_path):
    small = SmallRun(tmp_path)
    small.train("--train.steps", "2", **ALONE)
    plain = logged_metrics(small.run_dir)
    small.run_dir.rename(tmp_path / "plain")
    small.train("--train.steps", "2", "--with", "gpu_metrics", "--gpu-metrics.every-s", "0.05", **ALONE)
    watched = logged_metrics(small.run_dir)
    for step in (1, 2):
        own = {name: value for name, value in watched[step].items() if name.startswith("gpu/")}
        assert own.keys() == {
            *(f"gpu/{device}/{what}" for device in (0, 1) for what in ("utilisation", "power_w", "memory_gb", "temperature_c")),
            *("gpu/utilisation", "gpu/power_w"),
        }
        assert (own["gpu/utilisation"], own["gpu/1/power_w"], own["gpu/0/memory_gb"]) == (0.5, 50.0, 3.0)
        assert own["gpu/power_w"] == own["gpu/0/power_w"] + 50.0
        for name in ("loss", "grad_norm", "reward/mean"):
            assert watched[step][name] == plain[step][name]
    assert watched[2]["gpu/0/power_w"] == 300.0


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_a_machine_without_nvml_ends_the_command_with_two(tmp_path, more):
    done = SmallRun(tmp_path).train("--train.steps", "2", "--with", "gpu_metrics", *more, code=2, GPUS="none", **ALONE)
    assert "there is no NVML here, which comes with NVIDIA's driver" in done.stderr
    assert "leave out --with gpu_metrics on a machine without NVIDIA GPUs" in done.stderr
    assert list(tmp_path.iterdir()) == []
