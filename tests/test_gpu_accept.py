"""``scripts/gpu_accept.py`` without a GPU: every part's code runs, and what it finds is judged."""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"
PARTS = [
    *("mfu-1.5b", "mfu-3b", "logprobs", "prefix-gain", "prefix-gradient", "engine", "mismatch", "ipc", "ipc-killed"),
    *("offload", "growth", "resume", "vllm-bare", "vllm-process", "vllm-phases", "vllm-seeds"),
    *("trl", "trl-vllm"),
]
EVERYWHERE = ("prefix-gradient", "mismatch", "ipc-killed", "resume")


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
        "vllm-phases": "memory is not measured on a CPU",
    }
    if name in skipped:
        assert result["skipped"] == skipped[name]
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
