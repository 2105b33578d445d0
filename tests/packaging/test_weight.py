"""The host stays light: its lines of code, what an ordinary run loads and never calls, and the seconds of `make test`.

The figures are those reached last. They may only fall: who adds takes something away, or makes it a package. `python
benchmarks/host_size.py` prints lines by folder; docs/architecture.md says what stays, and why.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from ..scripts_as_modules import load_script

ROOT = Path(__file__).resolve().parents[2]
CORE, DISTRIBUTED = 24_102, 5_715
"""Lines of code: neither docstrings nor comments nor empty lines."""
ROOM, LARGER = 3_500, {"training": 4_290}
"""Most of a folder of the core, and those that have more."""
DOOR = 80
"""Most lines of code of a protocol's file that is a door: one in `rlhf_host/protocols`."""
LARGER_DOORS = {"runtimes.py": 86}
FAST_S = 926
"""Seconds of all fast tests, one after the other, as tests/durations.json has them; 1,200 would be ten minutes on two cores."""
IN_VAIN = 40
"""Files that the run loads though it calls no function of theirs."""


@pytest.fixture(scope="module")
def size():
    return load_script("benchmarks/host_size.py")


@pytest.fixture(scope="module")
def files(size):
    return [size.read(path, None) for path in sorted(size.HOST.rglob("*.py"))]


@pytest.fixture(scope="module")
def code(files) -> Counter[str]:
    """Folder of the host → its lines of code."""
    found: Counter[str] = Counter()
    for file in files:
        found[file.path.split("/")[0] if "/" in file.path else "(top)"] += len(file.code)
    return found


def test_the_core_and_the_distributed_half_do_not_grow(code):
    assert code["distributed"] <= DISTRIBUTED
    assert code.total() - code["distributed"] <= CORE


def test_no_room_grows_beyond_what_one_reads(code):
    too_large = {room: lines for room, lines in code.items() if lines > LARGER.get(room, ROOM) and room != "distributed"}
    assert too_large == {}


def test_doors_are_small(files):
    doors = {file.path.removeprefix("protocols/"): len(file.code) for file in files if file.path.startswith("protocols/")}
    assert {
        name: lines for name, lines in doors.items() if lines > LARGER_DOORS.get(name, DOOR) and name != "__init__.py"
    } == {}


def test_the_fast_tests_fit_into_their_time():
    seconds = json.loads((ROOT / "tests/durations.json").read_text(encoding="utf-8"))
    assert sum(fast for fast, _ in seconds.values()) <= FAST_S


def test_the_makefile_says_the_same_as_the_page_for_contributors():
    page = (ROOT / "docs/contributing.md").read_text(encoding="utf-8")
    targets = set(re.findall(r"`make ([\w-]+)`", page))
    known = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    assert targets <= known


@pytest.fixture(scope="module")
def ran(size, tmp_path_factory):
    """Files of the host that an ordinary run loads, with the lines that it executes."""
    return size.run_of(tmp_path_factory.mktemp("ran"))


def test_an_ordinary_run_passes_every_station_of_the_page(ran):
    program = load_script("scripts/stations.py")
    stations = program.stations()
    assert 10 < len(stations) <= 18
    assert len({station.file for station in stations}) <= 14
    missed = [
        station for station in stations if not any(station.first < line <= station.last for line in ran.get(station.file, ()))
    ]
    assert missed == []


def test_an_ordinary_run_loads_little_in_vain(files, ran):
    in_vain = [
        file.path for file in files if file.path in ran and file.in_functions and not file.in_functions & {*ran[file.path]}
    ]
    assert not [path for path in ran if path.startswith("distributed/")]
    assert len(in_vain) <= IN_VAIN, "loaded and never called:\n  " + "\n  ".join(in_vain)
