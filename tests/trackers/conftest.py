"""A context and trajectories as a run hands them to its trackers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from rlhf_authoring import trackers

from rlhf_host.config.schema import RunConfig
from rlhf_host.records.episodes import Reward, Segment, Task, Trajectory
from rlhf_host.records.needs import RunContext


@pytest.fixture
def odd_metrics() -> dict:
    """Values that no tracker may stumble over."""
    return {"nan": float("nan"), "inf": float("inf"), "text": "what?", "none": None, "list": [1, 2], "big": 10**400}


@pytest.fixture
def nasty() -> str:
    """Text that a model may write: escape sequences, markup, direction marks, a lone surrogate."""
    return "\x1b[2J\x07[bold red]hi[/bold red] [/nonsense] \x9b31m \u202egnp.exe \ud800 \u2028 \x00 ✓"


@pytest.fixture
def context(tmp_path: Path) -> Callable[..., RunContext]:
    def make(resume_step: int | None = None, **sections: dict) -> RunContext:
        config = RunConfig(**sections).model_dump(mode="json")
        resumed = resume_step is not None
        return RunContext(
            config, None, tmp_path / "run", 0, {}, resumed=resumed, resume_step=resume_step or 0, steps=config["train"]["steps"]
        )

    return make


@pytest.fixture
def trajectory() -> Callable[..., Trajectory]:
    def make(prompt: str = "2+3=", text: str = "5", *, sample: int = 0, observation: str | None = None, **fields) -> Trajectory:
        texts = [("prompt", prompt), ("action", text)]
        if observation is not None:
            texts += [("observation", observation), ("action", "done")]
        segments = []
        for kind, part in texts:
            ids = [ord(char) for char in part]
            sampled = kind == "action"
            segments.append(Segment(kind, ids, [-0.5] * len(ids) if sampled else None, [7] * len(ids) if sampled else None))
        fields = {"reward": 1.0, "score": 1.0, "rewards": {"math": Reward(1.0, score=1.0)}} | fields
        task = Task(prompt, ground_truth=fields.pop("label", "5"), index=3, source="sums")
        return Trajectory(f"episode-{sample}", "group-0", task, segments, sample=sample, decode=_decode, **fields)

    return make


def _decode(token_ids: Sequence[int]) -> str:
    return "".join(map(chr, token_ids))


@pytest.fixture
def odd_trajectories(nasty: str) -> list[Trajectory]:
    return trackers.odd_trajectories(nasty)
