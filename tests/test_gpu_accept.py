"""``scripts/gpu_accept.py`` without a GPU: every part's code runs, and what it finds is judged."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rlhf_host.distributed.sync.process_group import GroupSender
from rlhf_host.distributed.sync.remote import OtherEndGone

SCRIPTS = Path(__file__).parent.parent / "scripts"
PARTS = [
    *("mfu-1.5b", "mfu-3b", "liger-gain", "logprobs", "logits", "prefix-gain", "prefix-gradient", "flex-gain", "flex-gradient"),
    *("budget", "pictures-gradient", "pictures-gain", "pictures-run", "engine", "mismatch"),
    *("ipc", "ipc-bf16", "ipc-killed", "nccl-forming", "nccl-abort", "offload", "pinned", "growth", "resume"),
    *("vllm-bare", "vllm-process", "vllm-phases", "vllm-seeds", "colocated-sync", "trl", "trl-vllm"),
]
EVERYWHERE = ("prefix-gradient", "pictures-gradient", "mismatch", "ipc-killed", "nccl-forming", "nccl-abort", "resume")


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    before = list(sys.path)
    sys.path.insert(0, str(SCRIPTS))  # also for the engines' processes
    yield importlib.import_module("gpu_accept")
    sys.path[:] = before


@pytest.fixture
def accept(script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """``accept(*flags)``: the exit code and the JSON objects."""

    def run(*flags: str) -> tuple[Any, list[dict[str, Any]]]:
        monkeypatch.setattr(sys, "argv", ["gpu_accept.py", *flags])
        code: Any = 0
        try:
            script.main()
        except SystemExit as leaving:
            code = leaving.code
        return code, [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run


def test_every_part_is_here(script: ModuleType) -> None:
    assert script.NAMES == PARTS
    assert [part.name for part in script.PARTS if part.everywhere] == list(EVERYWHERE)


def test_the_page_of_results_has_every_part_in_both_tables_and_counts_them(script: ModuleType) -> None:
    section = (SCRIPTS.parent / "docs/results.md").read_text().split("## On a GPU\n")[1]
    limits, counts, figures = re.split(r"\n(The first run .*?:)\n\n", section, maxsplit=1, flags=re.S)
    for table in (limits, figures):
        named = [name for row in re.findall(r"^\| (`.*?) \| ", table, re.M) for name in re.findall(r"`(.*?)`", row)]
        assert sorted(named) == sorted(script.NAMES)
    met, missed = (len(re.findall(rf"\| {word} \|$", figures, re.M)) for word in ("yes", "no"))
    words = {6: "Six", 8: "eight", 17: "seventeen"}
    rest = words[len(script.NAMES) - met - missed]
    told = (
        f"{words[met]} of the {len(script.NAMES)} parts meet their limit, {words[missed]} do not, and {rest} are not measured"
    )
    assert told in counts.replace("\n", " ")


@pytest.mark.parametrize("name", PARTS)
def test_the_code_of_a_part_runs(name: str, accept: Any, tmp_path: Path) -> None:
    peer = tmp_path / "peer"  # an environment's Python as far as the benchmark uses it
    peer.write_text("""#!/bin/sh\necho '{"seconds": [1.0, 1.0]}'\n""")
    peer.chmod(0o755)
    code, (result,) = accept("--dry", "--here", "--part", name, "--peer-python", str(peer))
    assert result.get("error") is None
    assert code == 0
    skipped = {
        "offload": "the backend Torch moved nothing: only DeepSpeed's does, on a GPU",
        "liger-gain": "kernels 'liger' are not used to train Qwen2ForCausalLM: Triton needs CUDA",
        "budget": "memory is not measured on a CPU",
        "vllm-phases": "memory is not measured on a CPU",
        **dict.fromkeys(("flex-gain", "flex-gradient"), "FlexAttention has no backward pass on CPUs"),
    }
    if name in skipped:
        assert result["skipped"] == skipped[name]
        assert result["value"] is None
        assert result["ok"] is None, "not judged, and not met"
    else:
        assert math.isfinite(result["value"])
        assert result["ok"] is (True if name in EVERYWHERE else None)


def missed(machine: Any) -> tuple[float, dict[str, Any]]:
    return 2.0, {}


def broken(machine: Any) -> tuple[float, dict[str, Any]]:
    raise ArithmeticError("no number")


@pytest.mark.parametrize(("measure", "value", "error"), [(missed, 2.0, None), (broken, None, "ArithmeticError: no number")])
def test_a_number_that_is_missed_fails(
    measure: Any, value: Any, error: Any, script: ModuleType, accept: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = script.Part("mfu-1.5b", "", measure, at_most=1.0, everywhere=True)
    monkeypatch.setattr(script, "PARTS", [part])
    code, (result,) = accept("--dry", "--here")
    assert code == 1
    assert (result["value"], result["ok"], result["limit"], result.get("error")) == (value, False, "<= 1", error)


def skipped(machine: Any) -> tuple[float, dict[str, Any]]:
    from gpu_parts.machine import Skipped

    raise Skipped("nothing was moved")


def test_what_was_skipped_is_not_judged(
    script: ModuleType,
) -> None:
    cases = [("mfu-1.5b", skipped, 3.0), ("mfu-3b", missed, 3.0), ("logprobs", missed, 1.0)]
    parts = [script.Part(name, "", measure, at_most=limit, everywhere=True) for name, measure, limit in cases]
    results = [script.measure(part, script.Machine(dry=True)) for part in parts]
    assert [result["ok"] for result in results] == [None, True, False]
    expected = "1 met, 1 missed or failed, 1 not judged; not judged: mfu-1.5b"
    assert script.summary(results, script.Machine()) == expected
    assert script.summary(results, script.Machine(dry=True)).endswith("a dry run on the CPU, which judges nothing about a GPU")


@pytest.mark.parametrize(("gpus", "runs"), [(1, False), (2, True)])
def test_with_one_gpu_a_receiver_is_not_killed_in_mid_sync(
    gpus: int, runs: bool, script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(script.nccl.SHARED_GPU, raising=False)
    monkeypatch.setattr(script.torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(script.torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(script.nccl, "_killed", lambda machine, **where: (float(where["gpu"]), where))
    (part,) = (part for part in script.PARTS if part.name == "nccl-abort")
    result = script.measure(part, script.Machine())
    assert result["ok"] is (True if runs else None)
    assert result["value"] == (1.0 if runs else None), "the receiver is on the second GPU"
    assert ("two ranks on one GPU" in result.get("skipped", "")) is not runs


def test_a_broadcast_that_never_returns_does_not_keep_the_trainer(accept: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As NCCL's first one may, which forms a communicator with an end that is gone."""
    real, over = GroupSender.begin, threading.Event()
    calls = itertools.count()

    def begin(sender: GroupSender, slot: int, buffer: Any) -> None:
        if next(calls) == 0:
            over.wait(60)
            raise OtherEndGone("over")
        real(sender, slot, buffer)

    monkeypatch.setattr(GroupSender, "begin", begin)
    try:
        code, (result,) = accept("--dry", "--here", "--part", "nccl-forming")
    finally:
        over.set()
    assert (code, result["ok"], result["details"]["threads_that_hang"]) == (0, True, 1)
    assert result["value"] <= 10


def test_without_a_peer_trl_is_skipped(accept: Any) -> None:
    code, (result,) = accept("--dry", "--part", "trl")  # in a process of its own
    assert code == 0
    assert (result["ok"], result["skipped"]) == (
        None,
        "it needs --peer-python, the Python of an environment with torch and trl",
    )


def test_a_part_that_takes_too_long_is_ended(script: ModuleType, accept: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "LONGEST_S", 0.05)
    code, (result,) = accept("--dry", "--part", "logprobs")
    assert code == 1
    assert result["error"] == "not done after 0.05 s"
