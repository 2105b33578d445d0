from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rlhf_plugin_math_verifier import MathVerifier

from rlhf_host import Outcome, Reward, Segment, Task, Trajectory, Unjudged


def make_trajectory(text: str, ground_truth: Any) -> Trajectory:
    segments = [Segment("prompt", [0]), Segment("action", [1])]
    return Trajectory("e", "g", Task("q", ground_truth=ground_truth), segments, decode=lambda ids: text)


@pytest.fixture(scope="session")
def trajectory() -> Callable[[str, Any], Trajectory]:
    return make_trajectory


@pytest.fixture
def verifier() -> Iterator[Callable[..., MathVerifier]]:
    """Makes verifiers from options, and finishes their runs."""
    made: list[MathVerifier] = []

    def make(**options: Any) -> MathVerifier:
        made.append(MathVerifier(MathVerifier.Options(**({"workers": 2} | options))))
        return made[-1]

    yield make
    for each in made:
        each.run_finished(Outcome("finished", 1))


@pytest.fixture(scope="module")
def judge() -> Iterator[Callable[[str, Any], Reward | Unjudged]]:
    """Judges one text with the default options, by one verifier for the module's tests."""
    shared = MathVerifier(MathVerifier.Options(workers=1, timeout_s=60))
    yield lambda text, ground_truth: asyncio.run(shared.score([make_trajectory(text, ground_truth)], None))[0]
    shared.run_finished(Outcome("finished", 1))
