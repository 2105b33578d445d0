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


What: TypeAlias = Literal["logprobs", "values", "scores", "bootstrap", "entropy", "logits", "distribution"]
_OWN = ("logprobs", "values", "scores", "entropy", "logits")
_OF_ROLES = ("logprobs", "values", "bootstrap", "distribution")


@dataclass(frozen=True, slots=True)
class Output:
    """What a plugin wants computed.

    Without a role, of the pass that ``compute_loss`` sees: ``entropy`` (with gradient), ``logits``, ``values``, ``scores``. Of a
    role, over the experience and before advantages: ``logprobs``, ``values``, ``bootstrap`` (the value after the last token). A
    role's ``distribution`` comes with the pass, in ``outputs.others[role]``: over its ``top`` likeliest tokens, or over the whole
    vocabulary, for which the role has to be in one place with the actor.

    Raises ``ValueError`` for what there is not.
    """

    what: What
    role: str = ""
    top: int | None = None

    def __post_init__(self) -> None:
        if self.what not in (known := _OF_ROLES if self.role else _OWN):
            whose = f"of a role ({self.role!r})" if self.role else "of the pass itself (role '')"
            raise ValueError(f"there is no output {self.what!r} {whose}: {', '.join(known)}")
        if self.top is not None and (self.what != "distribution" or self.top < 1):
            raise ValueError(f"{self}: top is a number of tokens, of a distribution")


@dataclass(frozen=True, slots=True)
class Forbid:
    """A host setting that makes a plugin wrong: ``Forbid("train.old_logprobs", "sampler", "its weights would count twice")``."""

    setting: str
    value: Any
    why: str


@dataclass(frozen=True, slots=True)
class Needs:
    """What a plugin needs, from its options alone. The host merges, allocates exactly that, and refuses the impossible first.

    Raises ``TypeError`` where a text is given for an ``Output`` or a ``Forbid``.
    """

    data: DataFormat | None = None
    """Formats other than ``prompts`` are provisional: no run reads them yet."""
    roles: tuple[RoleNeed, ...] = ()
    min_group_size: int = 1
    outputs: tuple[Output, ...] = ()
    """Beyond the pass's own ``logprobs``."""
    forbids: tuple[Forbid, ...] = ()
    rewards: bool = True
    """False: it brings the signal itself, as a teacher does, or an agent that rewards its own steps; no reward has to be chosen."""
    on_policy: bool = False
    """It is right only for the weights that sampled: one update per batch, and nothing that was sampled before."""
    weights: Literal["token", "row"] | None = "token"
    """Of an algorithm: the ``importance_weights`` that its loss terms take: any, only those of whole rows, or none. Of a
    correction: what it gives, ``[B, T]`` or ``[B]``."""
    in_place: bool | None = None
    """Of a weight sync: it is only for engines that sample from the trainer's own module (True), or only for others (False)."""
    rounded_weights: bool = False
    """Of a weight sync: engines get weights in fewer bits than the trainer has, so log-probabilities differ."""
    unit_rows: bool = False
    """Provisional: no run sets ``unit_id`` yet. Rows that share one (pairs) must stay in one micro-batch."""

    def __post_init__(self) -> None:
        for name, kind in (("roles", RoleNeed), ("outputs", Output), ("forbids", Forbid)):
            for item in getattr(self, name):
                if not isinstance(item, kind):
                    raise TypeError(f"Needs: {name} is a tuple of {kind.__name__}(...), and has {item!r}")


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
    reason: str | None = None
    """Why a plugin ended it early (``Stop``)."""


@dataclass(frozen=True, slots=True)
class Stop:
    """``step_finished`` ends the run after this step, as finished: with its checkpoint and model."""

    reason: str


@dataclass(frozen=True, slots=True)
class Adjust:
    """``step_finished`` changes settings from the next step on: ``ROLE.lr`` (the peak learning rate), and ``ALIAS.NAME`` by the
    hook ``adjust`` of the plugin ``ALIAS``."""

    settings: Mapping[str, float]
