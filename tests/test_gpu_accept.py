"""``scripts/gpu_accept.py`` without a GPU: every part's code runs, and what it finds is judged."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import itertools
import json
import math
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf_host.distributed.sync.process_group import GroupSender
from rlhf_host.distributed.sync.remote import OtherEndGone

SCRIPTS = Path(__file__).parent.parent / "scripts"
PARTS = {
    **{name: [name] for name in ("mfu-1.5b", "mfu-3b", "mfu-3b-triton", "mfu-3b-autocast", "mfu-3b-16bit", "mfu-3b-all")},
    "kernels-triton": ["kernels-triton-float32", "kernels-triton-bfloat16", "kernels-triton"],
    "logits": ["logits", "logits-alone", "logits-kept", "logits-triton"],
    "engine": ["engine", "engine-paged", "engine-floor"],
    "vllm-all": ["vllm-seeds", "colocated-sync", "vllm-phases"],
    **{
        name: [name] for name in ("vllm-bare", "vllm-process", "vllm-library", "trl", "trl-vllm", "trl-prompts", "trl-generate")
    },
    **{name: [name] for name in ("liger-gain", "logprobs", "prefix-gain", "prefix-gradient", "flex-gain", "flex-gradient")},
    **{name: [name] for name in ("budget", "pictures-gradient", "pictures-gain", "pictures-run", "mismatch")},
    **{name: [name] for name in ("ipc", "ipc-bf16", "ipc-killed", "nccl-forming", "nccl-abort")},
    **{name: [name] for name in ("offload", "pinned", "growth", "resume")},
}
"""Part → its figures."""
EVERYWHERE = ("prefix-gradient", "pictures-gradient", "mismatch", "ipc-killed", "nccl-forming", "nccl-abort", "resume")


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    before = list(sys.path)
    sys.path.insert(0, str(SCRIPTS))  # also for the engines' processes
    yield importlib.import_module("gpu_accept")
    sys.path[:] = before


@pytest.fixture
def accept(script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """``accept(*flags)``: the exit code and the last JSON object of each figure."""

    def run(*flags: str) -> tuple[Any, list[dict[str, Any]]]:
        monkeypatch.setattr(sys, "argv", ["gpu_accept.py", *flags])
        code: Any = 0
        try:
            script.main()
        except SystemExit as leaving:
            code = leaving.code
        lines = map(json.loads, capsys.readouterr().out.splitlines())
        return code, list({line["part"]: line for line in lines}.values())

    return run


def test_every_part_is_here(script: ModuleType) -> None:
    assert {part.name: [figure.name for figure in part.figures] for part in script.PARTS} == PARTS
    everywhere = {figure.name for part in script.PARTS for figure in part.figures if figure.everywhere}
    assert everywhere == set(EVERYWHERE)


def test_parts_run_by_what_they_are_worth_per_second(script: ModuleType) -> None:
    rates = [part.worth_per_second for part in script.PARTS]
    assert rates == sorted(rates, reverse=True)
    names = [part.name for part in script.PARTS]
    assert names.index("vllm-bare") == names.index("vllm-all") + 1, "it knows the engine's rate then"
    assert names.index("trl") < names.index("ipc-killed") < names.index("flex-gain")


def test_the_three_calls_fit_into_their_seconds(script: ModuleType) -> None:
    by_name = {part.name: part for part in script.PARTS}
    for call in script.CALLS.values():
        assert table(script).estimate_s([by_name[name] for name in call.parts]) <= call.seconds
    assert sum(call.seconds for call in script.CALLS.values()) <= 900 - 90, "15 minutes without the machine's start"


def test_the_page_of_results_has_every_figure_once_and_counts_them(script: ModuleType) -> None:
    section = (SCRIPTS.parent / "docs/results.md").read_text().split("## On a GPU\n")[1]
    rows = re.findall(r"^\| (`.*?) \| .* \| (yes|no|) ?\|$", section, re.M)
    missing = re.search(r"^Not measured at all: (.*?)\.$", section, re.M | re.S)[1]
    named = [name for cell in (*(figures for figures, _ in rows), missing) for name in re.findall(r"`(.*?)`", cell)]
    assert sorted(named) == sorted(table(script).FIGURES)
    met, missed = (sum(verdict == word for _, verdict in rows) for word in ("yes", "no"))
    words = {6: "Six", 8: "eight"}
    rest = len(named) - met - missed
    told = f"{words[met]} of the {len(named)} figures meet their limit, {words[missed]} do not, and {rest} are not measured"
    assert told in section.replace("\n", " ")


@pytest.mark.parametrize("name", PARTS)
def test_the_code_of_a_part_runs(name: str, accept: Any, tmp_path: Path) -> None:
    peer = tmp_path / "peer"  # an environment's Python as far as the benchmark uses it
    peer.write_text("""#!/bin/sh\necho '{"seconds": [1.0, 1.0]}'\n""")
    peer.chmod(0o755)
    code, results = accept("--dry", "--here", "--part", name, "--peer-python", str(peer))
    assert [result.get("error") for result in results] == [None] * len(PARTS[name])
    assert code == 0
    assert sorted(result["part"] for result in results) == sorted(PARTS[name])
    memory, on_gpus = "memory is not measured on a CPU", "FlexAttention has no backward pass on CPUs"
    skipped = {
        "offload": "the backend Torch moved nothing: only DeepSpeed's does, on a GPU",
        "liger-gain": "kernels 'liger' are not used to train Qwen2ForCausalLM: Triton needs CUDA",
        **dict.fromkeys(("budget", "vllm-phases"), memory),
        **dict.fromkeys(("flex-gain", "flex-gradient"), on_gpus),
    }
    for result in results:
        figure = result["part"]
        assert "partial" not in result
        if "triton" in figure or figure in ("mfu-3b-all", "mfu-3b-autocast"):
            continue  # by what is installed
        if figure in skipped:
            assert result["skipped"] == skipped[figure]
            assert (result["value"], result["ok"]) == (None, None), "not judged, and not met"
        else:
            assert math.isfinite(result["value"])
            assert result["ok"] is (True if figure in EVERYWHERE else None)


def table(script: ModuleType) -> Any:
    return importlib.import_module("gpu_parts.table")


def part_of(script: ModuleType, measure: Any, *names: str, process: str = "", seconds: float = 0.0, **limits: Any) -> Any:
    """A part of these figures with the same limits, in the place of one that there is."""
    made = table(script)
    return made.Part(names[0], tuple(made.Figure(name, "", **limits) for name in names), measure, seconds, 1.0, process)


def missed(machine: Any, report: Any) -> None:
    report(2.0)


def broken(machine: Any, report: Any) -> None:
    report.so_far(0.5)
    raise ArithmeticError("no number")


@pytest.mark.parametrize(("measure", "value", "error"), [(missed, 2.0, None), (broken, 0.5, "ArithmeticError: no number")])
def test_a_number_that_is_missed_fails(
    measure: Any, value: Any, error: Any, script: ModuleType, accept: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "PARTS", [part_of(script, measure, "mfu-1.5b", at_most=1.0, everywhere=True)])
    code, (result,) = accept("--dry", "--here")
    assert code == 1
    assert (result["value"], result["ok"], result["limit"], result.get("error")) == (value, False, "<= 1", error)


def skipped(machine: Any, report: Any) -> None:
    from gpu_parts.machine import Skipped

    report(1.0, {}, "one")
    report.so_far(1.0, {}, "two")
    raise Skipped("nothing was moved")


def forgetful(machine: Any, report: Any) -> None:
    report(1.0, {}, "one")


def results_of(script: ModuleType, *parts: Any) -> dict[str, Any]:
    lines: list[dict[str, Any]] = []
    for part in parts:
        script.measuring.measure(part, script.Machine(dry=True), lines.append)
    return {line["part"]: line for line in lines}


def test_what_was_skipped_is_not_judged_and_what_was_forgotten_fails(script: ModuleType) -> None:
    cases = [("a", missed, 3.0), ("b", missed, 1.0)]
    parts = [part_of(script, measure, name, at_most=limit, everywhere=True) for name, measure, limit in cases]
    results = results_of(script, *parts, part_of(script, skipped, "one", "two", everywhere=True))
    assert {name: result["ok"] for name, result in results.items()} == {"a": True, "b": False, "one": True, "two": None}
    assert results["two"]["value"] is None
    expected = "2 met, 1 missed or failed, 1 not judged; not judged: two"
    assert script.summary(results.values(), False) == expected
    assert script.summary(results.values(), True).endswith("a dry run on the CPU, which judges nothing about a GPU")
    forgotten = results_of(script, part_of(script, forgetful, "one", "two"))["two"]
    assert (forgotten["ok"], forgotten["error"]) == (False, "part one ended without this figure")


@pytest.mark.parametrize(("gpus", "runs"), [(1, False), (2, True)])
def test_with_one_gpu_a_receiver_is_not_killed_in_mid_sync(
    gpus: int, runs: bool, script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    nccl = importlib.import_module("gpu_parts.nccl")
    monkeypatch.delenv(nccl.SHARED_GPU, raising=False)
    monkeypatch.setattr(script.torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(script.torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(nccl, "_killed", lambda machine, report, **where: report(where["gpu"], where))
    (part,) = (part for part in script.PARTS if part.name == "nccl-abort")
    lines: list[dict[str, Any]] = []
    script.measuring.measure(part, script.Machine(), lines.append)
    result = lines[-1]
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


def test_without_a_peer_trl_is_skipped(script: ModuleType, accept: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "trl" else real(name, *rest))
    code, (result,) = accept("--dry", "--here", "--part", "trl")
    assert (code, result["ok"]) == (0, None)
    assert result["skipped"] == "it needs trl, installed here or in the environment of --peer-python"


def test_a_model_for_both_sides_is_written_once_in_16_bits_and_has_an_end_for_one(script: ModuleType, tmp_path: Path) -> None:
    benchmark = importlib.import_module("gpu_parts.against_trl")._benchmark()
    case = dataclasses.replace(benchmark.CASES["1b-prompts"], size=(32, 2, 4), steps=2)
    inputs = benchmark.prepare(case, tmp_path, None)
    peer, ours = inputs["peer"], inputs["ours"]
    weights = load_file(peer / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert inputs["parameters"] == sum(weight.numel() for weight in weights.values())
    assert (ours / "model.safetensors").resolve() == (peer / "model.safetensors").resolve()
    ends = [json.loads((folder / "generation_config.json").read_text()).get("eos_token_id") for folder in (peer, ours)]
    assert ends == [2, None]
    assert inputs["prompt_tokens"] >= case.prompt
    config = json.loads((ours / "config.json").read_text())
    assert config["max_position_embeddings"] >= inputs["prompt_tokens"] + case.new_tokens
    assert (config["hidden_size"], config["head_dim"], config["num_hidden_layers"]) == (32, 8, 2)


def test_a_peer_that_sampled_less_is_no_peer(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's answers may end early where they should not, as under continuous batching without a least length."""
    benchmark = importlib.import_module("gpu_parts.against_trl")._benchmark()
    monkeypatch.setattr(benchmark, "run_peer", lambda *_: {"seconds": [1.0], "tokens": [15]})
    options = argparse.Namespace(device="cpu", vllm=False, continuous_batching=True, liger=False, peer_python="", threads=1)
    with pytest.raises(SystemExit, match=r"TRL sampled \[15\] tokens in its steps, not 16 in each"):
        benchmark.peer_run(benchmark.CASES["smoke"], {"peer": "", "data": ""}, options)


SERVER = """
import json, os, sys, time
def say(**line): print(json.dumps(line), flush=True)
for name in map(str.strip, sys.stdin):
    line = {"part": name, "limit": "", "ok": True, "details": {"process": os.getpid()}}
    say(**line, value=1.0, partial=True)
    if name == "slow":
        say(**line | {"part": "done"}, value=4.0)
        say(**line, value=2.0, partial=True)
        time.sleep(60)
    if name == "dies":
        os._exit(3)
    say(**line | ({"ok": False, "error": "an error of CUDA"} if name == "fails" else {}), value=3.0)
    say(end=name, held_gb=2.0 if name == "heavy" else 0.0)
"""
"""A process that measures, without torch."""


@pytest.fixture
def stand_in(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``stand_in(*parts)``: parts in the order given, and a process that needs no time to start."""
    monkeypatch.setattr(script, "_command", lambda machine: [sys.executable, "-S", "-c", SERVER])
    monkeypatch.setattr(script, "START_S", 0.0)
    return lambda *parts: monkeypatch.setattr(script, "PARTS", list(parts))


def test_a_part_whose_time_is_over_ends_and_has_its_latest_partial_value(
    script: ModuleType, stand_in: Any, accept: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "LONGEST_S", 1.0)
    stand_in(part_of(script, None, "slow", "done", "never", process="models"), part_of(script, None, "next", process="models"))
    code, results = accept("--dry")
    slow, done, never, following = (
        {each["part"]: each for each in results}[name] for name in ("slow", "done", "never", "next")
    )
    assert (slow["value"], slow["ok"], slow["partial"], slow["cut"]) == (2.0, True, True, "after 1 s")
    assert (done["value"], "partial" in done) == (4.0, False), "it was there before"
    assert (never["value"], never["ok"], never["error"]) == (None, False, "not done after 1 s")
    assert (following["value"], following["details"]["process"] != slow["details"]["process"]) == (3.0, True)
    assert code == 1
    assert "by a partial value: slow" in script.summary(results, False)


def test_parts_share_a_process_until_one_leaves_memory_fails_or_dies(script: ModuleType, stand_in: Any, accept: Any) -> None:
    names = ("a", "b", "heavy", "c", "fails", "d", "dies", "e")
    shared = [part_of(script, None, name, process="models") for name in names]
    stand_in(*shared, part_of(script, None, "own"), part_of(script, None, "own2"))
    _, results = accept("--dry")
    processes = {result["part"]: result["details"]["process"] for result in results}
    assert processes["a"] == processes["b"] == processes["heavy"]
    assert processes["c"] == processes["fails"]
    assert processes["d"] == processes["dies"]
    assert len({processes[name] for name in ("a", "c", "d", "e", "own", "own2")}) == 6
    (dead,) = (result for result in results if result["part"] == "dies")
    assert (dead["value"], dead["ok"], dead["partial"], dead["error"]) == (1.0, False, True, "its process ended with 3")


def test_what_does_not_fit_into_the_seconds_is_skipped_by_name(
    script: ModuleType, stand_in: Any, accept: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(*(part_of(script, None, name, process="models", seconds=s) for name, s in (("a", 1), ("b", 500), ("c", 2))))
    code, results = accept("--dry", "--seconds", "60")
    assert code == 0
    assert [result["value"] for result in results] == [3.0, None, 3.0]
    assert re.fullmatch(r"its estimate of 500 s does not fit into the \d+ s that are left", results[1]["skipped"])


def test_the_file_of_results_is_added_to_by_the_same_commit_and_device_alone(
    script: ModuleType, stand_in: Any, accept: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(*(part_of(script, None, name, process="models") for name in ("a", "b")))
    path, flags = tmp_path / "new" / "figures.json", ("--dry", "--commit", "c0ffee", "--results")
    for name in ("a", "b"):
        assert accept("--part", name, *flags, str(path))[0] == 0
    content = json.loads(path.read_text())
    assert (content["format"], content["commit"], content["device"]["name"]) == (1, "c0ffee", "cpu, dry run")
    assert content["versions"]["torch"] == importlib.metadata.version("torch")
    assert {name: figure["value"] for name, figure in content["figures"].items()} == {"a": 3.0, "b": 3.0}
    assert content["started"] <= content["ended"]
    bad, (nothing,) = tmp_path / "bad", ([],)
    bad.write_text("[]")
    newer = tmp_path / "newer.json"
    newer.write_text(json.dumps(content | {"format": 2}))
    for place, problem in (
        (path, "has results of another commit"),
        (newer, "has results of another format and commit"),
        (bad, "is not a file of results (TypeError)"),
        (bad / "x", "cannot be written (File exists)"),
    ):
        monkey = ("--dry", "--commit", "other", "--results", str(place), "--part", "a")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["gpu_accept.py", *monkey])
            with pytest.raises(SystemExit) as leaving:
                script.main()
        printed = capsys.readouterr()
        assert (leaving.value.code, printed.out.splitlines()) == (2, nothing)
        assert printed.err == f"{place} {problem}: choose another --results\n"


def test_a_file_that_can_no_longer_be_written_is_named_and_nothing_is_left_half_written(tmp_path: Path) -> None:
    figures = importlib.import_module("gpu_parts.figures")
    path = tmp_path / "figures.json"
    file = figures.FigureFile(path, dry=True, commit="c0ffee")
    path.unlink()
    path.mkdir()
    with pytest.raises(
        figures.UnfitFile, match=r"figures\.json cannot be written \(Is a directory\): choose another --results"
    ):
        file.add({"part": "a", "value": 1.0})
    assert [each.name for each in tmp_path.iterdir()] == ["figures.json"]
    with pytest.raises(figures.UnfitFile, match=r"figures\.json is not a file: choose another"):
        figures.FigureFile(path, dry=True, commit="c0ffee")


def test_a_call_says_what_it_carries(script: ModuleType, tmp_path: Path) -> None:
    figures = importlib.import_module("gpu_parts.figures")
    for name, size in (("small", 3_000_000), ("large", 70_000_000)):
        (tmp_path / name).mkdir()
        with open(tmp_path / name / "piece-00", "wb") as piece:
            piece.truncate(size)
        (tmp_path / name / "SUMS").touch()
    shown, small, large = (
        figures.carried("first", script.PARTS[:1], folder) for folder in (None, tmp_path / "small", tmp_path / "large")
    )
    assert re.fullmatch(r"call first: 30 of 260 s by the estimates; carries a checkout of [\d.]+ MB", shown)
    assert small == f"{shown} and 2 files of 3.0 MB, which fits into 67.1 MB"
    assert large == f"{shown} and 2 files of 70.0 MB, which does not fit into 67.1 MB"


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--seconds", "nan"), "--seconds: at least 0, not nan"),
        (("--steps", "1"), "--steps: at least 2, not 1"),
        (("--peak-tflops", "nan"), "--peak-tflops: a number above 0, not nan"),
        (("--peak-tflops", "0"), "--peak-tflops: a number above 0, not 0"),
        (("--peer-python", "/no/python"), "--peer-python: /no/python is no program"),
        (("--rounds", "0"), "--rounds: at least 1, not 0"),
        (("--pieces", "x"), "--pieces: one folder for each --call, in their order"),
        (("--call", "first", "--pieces", "x"), "--pieces: x is no folder"),
        (("--call", "first", "--part", "trl"), "not allowed with argument --call"),
    ],
)
def test_flags_that_cannot_be_are_refused(
    flags: tuple[str, ...],
    problem: str,
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_accept.py", "--dry", *flags])
    with pytest.raises(SystemExit) as leaving:
        script.main()
    assert leaving.value.code == 2
    assert problem in capsys.readouterr().err.splitlines()[-1]


def test_the_script_of_a_call_joins_its_pieces_and_gives_the_call_the_time_that_is_left(tmp_path: Path) -> None:
    python, out, keep, pieces = (tmp_path / name for name in ("python", "out", "keep", "pieces"))
    python.write_text("""#!/bin/sh
echo "$@" in $PYTHONPATH >>"$KEEP/said"
case $1 in
    *join.py) echo joins; mkdir $3 ;;
    *) echo line; echo {} >$KEEP/growth.json; exit 1 ;;
esac
""")
    python.chmod(0o755)
    (pieces / "caches/vllm").mkdir(parents=True)
    for name in ("SUMS", "piece-00"):
        (pieces / name).write_text(name)
    (keep / "site-0123456789ab.unfinished").mkdir(parents=True)
    environment = {"PATH": os.environ["PATH"], "PYTHON": str(python), "OUT": str(out), "KEEP": str(keep), "COMMIT": "c0ffee"}
    for call, code in (("first", 1), ("second", 1), ("fourth", 2)):
        command = ["bash", str(SCRIPTS / "gpu_calls.sh"), call, str(pieces)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (code, "line\n" if code == 1 else ""), done.stderr
    assert "One of the three calls" in done.stderr
    absent = subprocess.run([*command[:2], "first", "absent"], env=environment, capture_output=True, text=True)
    assert (absent.returncode, absent.stdout, absent.stderr) == (2, "", "absent is no folder of pieces\n")
    (site,) = {*keep.glob("site-*")} - {*keep.glob("*.unfinished")}
    said = (keep / "said").read_text()
    assert said.count(f"scripts/gpu_carry/join.py {keep}/pieces {site}") == 1
    assert (keep / "pieces/piece-00").read_text() == "piece-00"
    for call, limit in (("first", r"2(60|5\d)"), ("second", r"2(90|8\d)")):
        assert re.search(rf"^scripts/gpu_accept.py --commit c0ffee --call {call} --seconds {limit} in {site}$", said, re.M)
    assert f"--commit c0ffee --part growth --results {keep}/growth.json" in said
    assert (out / "first.jsonl").read_text() == (out / "growth.jsonl").read_text() == "line\n"
    assert (out / "growth.json").is_file()
    assert (out / "caches/vllm").is_dir()
    assert (keep / "caches/vllm").is_dir()
