"""The order in which tests run, and which of several workers (``pytest -n 2 --dist loadfile``) takes a file."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from .tiers import mark_slow

TOGETHER = {
    "Ray": (  # one cluster at a time
        "tests/backends/test_ray_autotp.py",
        "tests/runtimes/test_ray.py",
        "tests/runtimes/test_ray_nodes.py",
        "tests/runtimes/test_ray_run.py",
        "tests/runtimes/test_whole_stack.py",
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
    "tests/backends/test_ranks.py",
    "tests/backends/test_offline_ranks.py",
    *TOGETHER["wheels"],
)
"""What takes longest, first: begun last, it would be left to one worker. ``pytest --durations=0`` tells."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_slow(items)
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(file_of(item.nodeid), len(places)))


def pytest_collection_finish() -> None:
    gc.freeze()  # the libraries' objects stay: every search for garbage among them would take a second


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    units = {file: name for name, files in TOGETHER.items() for file in files}

    class Files(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return units.get(file_of(nodeid), file_of(nodeid))

    return Files(config, log)


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]
