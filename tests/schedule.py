"""The order in which tests run, which worker takes a file, and when the time of a tier is over.

``tests/durations.json`` has the seconds of each file, of its fast and of its slow tests; ``make durations`` writes it.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from rlhf_host import garbage

from .forks import never_wait_for_the_disk
from .tiers import mark_slow

DURATIONS = Path(__file__).with_name("durations.json")
FAST, SLOW = 0, 1
TOGETHER = {
    "Ray": (  # one cluster at a time
        "tests/distributed/deepspeed/test_ray_autotp.py",
        "tests/distributed/ray/test_ray.py",
        "tests/distributed/ray/test_nodes.py",
        "tests/distributed/ray/test_run.py",
        "tests/distributed/ray/test_whole_stack.py",
        "tests/training/test_async.py",
        "tests/training/test_lora.py",  # vLLM's shared memory would be taken for what test_whole_stack leaves
    ),
    "wheels": (  # built once
        "tests/packaging/test_alone.py",
        "tests/packaging/test_wheels.py",
        "tests/template/test_installed.py",
    ),
}
"""Files that one worker takes, one after the other, and why."""

LONGEST = (
    *TOGETHER["Ray"],
    "tests/distributed/split/test_ranks.py",
    "tests/distributed/split/test_offline_ranks.py",
    *TOGETHER["wheels"],
)
"""Files that take longest, which begin first: begun last, they would be left to one worker."""
RECORD = "RLHF_RECORD_DURATIONS" in os.environ
"""True if the seconds of what runs are written. Read now: tests change the environment."""
UNTIL = os.environ.get("RLHF_TESTS_UNTIL")
"""When the time of the slow tests is over, in seconds since 1970. What would end later is skipped, and named."""
PLANNED: Counter[str] = Counter()
"""File → number of its slow tests that were collected."""
LEFT = "left, its time is over: "
MARGIN = 1.5
"""A machine may be slower than the one of which the seconds were recorded."""


def pytest_configure(config: pytest.Config) -> None:
    # A shell that starts this in the background ignores SIGINT, nohup SIGHUP, and all processes that tests start would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    never_wait_for_the_disk()
    if RECORD and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder())


@cache
def durations() -> dict[str, list[float]]:
    """File → seconds of its fast tests, and of its slow ones."""
    return json.loads(DURATIONS.read_text(encoding="utf-8"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_slow(items)
    if UNTIL:
        PLANNED.update(file_of(item.nodeid) for item in items if item.get_closest_marker("slow"))
        return  # the files are in the order in which they matter
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(file_of(item.nodeid), len(places)))


def pytest_collection_finish() -> None:
    garbage.freeze()  # the libraries' objects stay: every search for garbage among them would take a second


@pytest.hookimpl(trylast=True)  # fixtures of the file have ended
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is None or file_of(nextitem.nodeid) != file_of(item.nodeid):
        garbage.freeze()  # vLLM undoes it as it ends, and every run would search all again, half a second


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Files(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(file_of(nodeid))

    return Files(config, log)


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def unit_of(file: str) -> str:
    return next((name for name, files in TOGETHER.items() if file in files), file)


# --- a tier that ends in time --------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if not UNTIL:
        return
    file = file_of(item.nodeid)
    expected = MARGIN * durations().get(file, [0.0, 0.0])[SLOW] / PLANNED[file]
    if time.time() + expected > float(UNTIL):
        pytest.skip(LEFT + file)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    left = Counter(
        file_of(report.nodeid) for report in terminalreporter.stats.get("skipped", ()) if LEFT in str(report.longrepr)
    )
    if left:
        terminalreporter.write_sep("-", f"{left.total()} tests left for make test-all: their time was over")
        for file, count in sorted(left.items()):
            terminalreporter.write_line(f"{file}: {count}")


class Recorder:
    """Adds up the seconds of each file that ran, and writes them in place of those recorded before. Where no test of a tier ran
    at all, as in ``RLHF_RECORD_DURATIONS=1 make test``, its seconds stay; else a file has 0 for a tier of which it ran nothing.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[file_of(report.nodeid)][SLOW if "slow" in report.keywords else FAST] += report.duration

    def pytest_sessionfinish(self) -> None:
        found = {file: both for file, both in durations().items() if (DURATIONS.parents[1] / file).exists()}
        tiers = [tier for tier in (FAST, SLOW) if any(both[tier] for both in self.seconds.values())]
        for file, both in self.seconds.items():
            before = found.get(file, [0, 0])
            found[file] = [round(both[tier], 1) if tier in tiers else before[tier] for tier in (FAST, SLOW)]
        rows = ",\n".join(f" {json.dumps(file)}: {json.dumps(both)}" for file, both in sorted(found.items()) if any(both))
        DURATIONS.write_text(f"{{\n{rows}\n}}\n", encoding="utf-8")
