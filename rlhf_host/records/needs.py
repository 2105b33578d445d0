"""What plugins declare, and what a run tells them at its start and end. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from rlhf_host.records.episodes import Trajectory

DataFormat: TypeAlias = Literal["prompts", "prompt_completion", "preference", "unpaired", "stepwise"]


@dataclass(frozen=True, slots=True)
class RoleNeed:
    """A model a plugin needs. ``source`` is a role name (``actor``), a path, or ``None`` for the role's own setting."""

    name: str
    head: Literal["lm", "scalar"] = "lm"
    trainable: bool = False
    source: str | None = "actor"
    lr: float | None = None
    """Peak learning rate where the configuration sets none."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a plugin needs, from its options alone. The host merges, allocates exactly that, and refuses the impossible first."""

    data: DataFormat | None = None
    roles: tuple[RoleNeed, ...] = ()
    min_group_size: int = 1
    outputs: frozenset[str] = frozenset()
    """Beyond ``logprobs``: ``values``, ``entropy`` (with gradient), ``logits``, ``scores``; ``ROLE.logprobs`` asks for
    another role's log-probabilities of the experience before advantages, ``ROLE.values`` for its values, ``ROLE.bootstrap`` for
    its value after the last token (``bootstrap_value``)."""
    unit_rows: bool = False
    """Rows that share a ``unit_id`` (pairs) must stay in one micro-batch."""
    forbids: frozenset[str] = frozenset()
    """Names of host settings that make this plugin wrong, such as ``old_logprobs=sampler``."""
    in_place: bool | None = None
    """Of a weight sync: it is only for engines that sample from the trainer's own module (True), or only for others (False)."""
    rounded_weights: bool = False
    """Of a weight sync: engines get weights in fewer bits than the trainer has, so log-probabilities differ."""


@dataclass(slots=True)
class RunContext:
    """Given to ``run_started``; read-only."""

    config: Mapping[str, Any]
    tokenizer: Any
    run_dir: Path | None
    seed: int
    roles: Mapping[str, RoleHandle]
    resumed: bool = False
    resume_step: int = 0
    """The step of the checkpoint that a resumed run goes on from; -1 where there was none yet."""
    notices: tuple[str, ...] = ()
    """What a person should know of the start: data read, filtered and truncated."""


class RoleHandle(Protocol):
    """A role as a plugin sees it: awaitable forward passes without gradient."""

    @property
    def tokenizer(self) -> Any:
        """The role's own, loaded when it is first asked for."""
        ...

    @property
    def context_length(self) -> int:
        """Longest row, in tokens."""
        ...

    async def logprobs(self, trajectories: Sequence[Trajectory]) -> list[list[float]]:
        """Per trajectory, log-probabilities of its completion tokens."""
        ...

    async def values(self, trajectories: Sequence[Trajectory]) -> list[list[float]]:
        """Per trajectory, the scalar head at each completion token."""
        ...

    async def scores(self, trajectories: Sequence[Trajectory]) -> list[float]:
        """Per trajectory, the scalar head at its last token."""
        ...


@dataclass(slots=True)
class ScoreContext:
    """Given to ``score``: which split, and the step the trajectories belong to."""

    split: Literal["train", "eval"] = "train"
    step: int = 0
    roles: Mapping[str, RoleHandle] = field(default_factory=dict)
    tokenizer: Any = None


@dataclass(slots=True)
class Outcome:
    """How the run ended, for ``run_finished``."""

    status: Literal["finished", "interrupted", "failed"]
    step: int
    run_dir: Path | None = None
    error: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
