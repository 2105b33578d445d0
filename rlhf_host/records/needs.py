"""Declarations of plugins, and the records that they receive at the start and end of a run. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self, TypeAlias, get_args

from rlhf_host.records.episodes import Task, Trajectory

if TYPE_CHECKING:
    from rlhf_host.protocols.syncs import WeightSource

DataFormat: TypeAlias = Literal["prompts", "prompt_completion", "preference", "triple", "unpaired", "rated", "stepwise"]


@dataclass(frozen=True, slots=True)
class Follow:
    """Movement of a frozen role's weights: after every ``every``-th step they go by ``share`` towards those of the role that it
    comes from, ``w ← w + share·(w_source − w)``. ``Follow()`` is that role itself, at all times and without memory of its own.

    Raises ``ValueError`` for a share outside (0, 1], and for fewer than one step.
    """

    share: float = 1.0
    every: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"Follow: share is a number above 0 and up to 1, not {self.share!r}")
        if not isinstance(self.every, int) or self.every < 1:
            raise ValueError(f"Follow: every is a number of steps from 1, not {self.every!r}")

    @property
    def live(self) -> bool:
        """True if the weights are always those of the source."""
        return self.share == 1 and self.every == 1


@dataclass(frozen=True, slots=True)
class RoleNeed:
    """A model that a plugin needs. ``source`` is a role (``actor``), a path, or ``None`` for the model set for the role."""

    name: str
    head: Literal["lm", "scalar"] = "lm"
    trainable: bool = False
    source: str | None = "actor"
    lr: float | None = None
    """Peak learning rate if the configuration sets none."""
    idle_steps: int = 0
    """Number of first steps in which the host takes no step with it: loss terms, of any plugin, count only after them, and so
    does its learning rate's schedule.
    """
    generates: bool = False
    """A frozen model that agents talk to (``policy.role``). Where plugins need the same role, it generates if one of them says
    so.
    """
    mixes: float | None = None
    """For a role that generates: it samples from its geometric mixture with the role that it comes from, as that is trained,
    ``p ∝ p_source^(1 − mixes)·p_own^mixes`` token by token. Only engines that sample with modules of transformers can."""
    follows: Follow | None = None
    """A frozen model whose weights move: an average of the policy's, a moving reference, or the policy itself as a teacher. Where
    plugins need the same role, it moves if one of them says so."""
    own_tokens: bool = False
    """A frozen model with another tokenizer than the policy's: it reads the rows that the hook ``rewrite_rows`` gives in its own
    tokens."""

    @property
    def moves(self) -> bool:
        """True if it has weights of its own that move, which a checkpoint has to keep."""
        return self.follows is not None and not self.follows.live

    def __post_init__(self) -> None:
        if self.follows is not None and (self.trainable or self.generates or self.source is None or self.source == self.name):
            raise ValueError(f"the role {self.name!r} follows another, so it is frozen, does not generate, and has a source")
        if self.own_tokens and (self.trainable or self.source == "actor"):
            raise ValueError(f"the role {self.name!r} has its own tokens, so it is frozen, and another model than the actor")
        if self.mixes is not None and not (0 < self.mixes < 1 and self.generates and self.source == "actor"):
            raise ValueError(
                f"the role {self.name!r} mixes, so it generates, comes from the actor, and its share lies between 0 and 1"
            )
        if self.generates and (self.trainable or self.head != "lm" or self.name == "actor"):
            raise ValueError(
                f"the role {self.name!r} generates, so it is no actor, frozen, and has the head of a language model"
            )


What: TypeAlias = Literal[
    "logprobs", "values", "scores", "token_scores", "bootstrap", "entropy", "collision", "logits", "distribution"
]
_OWN = ("logprobs", "values", "scores", "token_scores", "entropy", "logits")
_OF_ROLES = ("logprobs", "values", "bootstrap", "distribution", "entropy", "collision")


@dataclass(frozen=True, slots=True)
class Output:
    """A quantity that the host must compute for a plugin.

    Without a role, it belongs to the pass that ``compute_loss`` sees: ``entropy`` (with gradient), ``logits``, ``values``,
    ``scores`` or ``token_scores``. With a role, it is computed over the experience, before advantages: ``logprobs``,
    ``entropy``, ``collision`` (the sum of the squared probabilities), ``values`` or ``bootstrap`` (the value after the last token).
    The ``distribution`` of a role is in
    ``outputs.others[role]`` of the pass. It covers the ``top`` likeliest tokens, or the whole vocabulary; then the role must be in
    the same place as the actor.

    Raises ``ValueError`` for an unknown combination.
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
    """A setting with which a plugin does not work: ``Forbid("train.old_logprobs", "sampler", "its weights would count twice")``."""

    setting: str
    value: Any
    why: str


@dataclass(frozen=True, slots=True)
class Needs:
    """The needs of a plugin; they depend only on its options. The host merges all needs, provides exactly these, and first
    refuses impossible runs. Some kinds of plugins have more to say, with ``AlgoNeeds``, ``AgentNeeds``, ``RewardNeeds`` or
    ``CorrectionNeeds``.

    Raises ``TypeError`` for a string in place of an ``Output`` or a ``Forbid``, ``ValueError`` for other invalid values.
    """

    kinds: ClassVar[tuple[str, ...]] = ()
    """Kinds of plugins whose needs these can be; empty: all."""

    data: DataFormat | None = None
    """Data for training: ``prompts`` that the engine answers, or rows of a data set."""
    roles: tuple[RoleNeed, ...] = ()
    min_group_size: int = 1
    """Number of episodes of a task that it compares. The host refuses a smaller ``rollout.n``, and leaves rows of smaller
    groups out of the loss, unless a plugin makes the rows to train on.
    """
    outputs: tuple[Output, ...] = ()
    """In addition to the ``logprobs`` of the pass."""
    forbids: tuple[Forbid, ...] = ()
    rewards: bool = True
    """False: no reward is needed, because the plugin provides the signal: a teacher, or an agent that rewards its steps."""
    on_policy: bool = False
    """True: it is only correct for the weights that sampled. So one update per batch, and no saved trajectories."""

    @classmethod
    def of(cls, needs: Needs | None) -> Self:
        """Return the needs if they are of this kind, else the defaults of this kind."""
        return needs if isinstance(needs, cls) else cls()

    @property
    def samples(self) -> bool:
        """True if it trains on answers that the run samples, not on rows of a data set."""
        return self.data in (None, "prompts")

    def __post_init__(self) -> None:
        for name, kind in (("roles", RoleNeed), ("outputs", Output), ("forbids", Forbid)):
            for item in getattr(self, name):
                if not isinstance(item, kind):
                    raise TypeError(f"Needs: {name} is a tuple of {kind.__name__}(...), and has {item!r}")
        if self.data is not None and self.data not in get_args(DataFormat):
            raise ValueError(f"Needs: data is None or one of {', '.join(get_args(DataFormat))}, not {self.data!r}")
        if not isinstance(self.min_group_size, int) or self.min_group_size < 1:
            raise ValueError(f"Needs: min_group_size is a number from 1, not {self.min_group_size!r}")


@dataclass(frozen=True, slots=True)
class AlgoNeeds(Needs):
    """Needs of an algorithm, and of a whole run."""

    kinds: ClassVar[tuple[str, ...]] = ("algo",)

    weights: Literal["token", "row"] | None = "token"
    """The ``importance_weights`` that its loss terms accept: any (``token``), only ``[B]`` (``row``), or none (``None``)."""
    ratio: bool = True
    """False: its loss has no ratio to the policy that sampled. So nothing corrects the later of several updates per batch, and a
    warning says so.
    """
    unit_rows: bool = False
    """True: rows that share a ``unit_id`` (pairs) must stay in one micro-batch."""
    texts: bool = False
    """True: rows of a data set keep their text and further columns: ``Task.prompt``, ``ground_truth`` and ``metadata``."""
    separator: str | None = None
    """For ``stepwise`` data: the text after each step, whose last token has the step's label; ``None``: a line break."""

    def __post_init__(self) -> None:
        Needs.__post_init__(self)
        if self.weights not in ("token", "row", None):
            raise ValueError(f"AlgoNeeds: weights is 'token', 'row' or None, not {self.weights!r}")


@dataclass(frozen=True, slots=True)
class CorrectionNeeds(Needs):
    """Needs of an extension with ``importance_weights``."""

    kinds: ClassVar[tuple[str, ...]] = ("extension",)

    weights: Literal["token", "row"] = "token"
    """Shape of its weights: ``[B, T]`` (``token``) or ``[B]`` (``row``)."""

    def __post_init__(self) -> None:
        Needs.__post_init__(self)
        if self.weights not in ("token", "row"):
            raise ValueError(f"CorrectionNeeds: weights is 'token' or 'row', not {self.weights!r}")


@dataclass(frozen=True, slots=True)
class AgentNeeds(Needs):
    """Needs of an agent."""

    kinds: ClassVar[tuple[str, ...]] = ("agent", "extension")

    episodes_at_once: int | None = None
    """Number of its episodes that are played at the same time, for each split. Their deadlines begin with them."""
    server: bool = False
    """True: it calls ``policy.endpoint()``, so a run without an installed server (the package
    ``rlhf-server``) is refused before it starts.
    """


@dataclass(frozen=True, slots=True)
class RewardNeeds(Needs):
    """Needs of a reward."""

    kinds: ClassVar[tuple[str, ...]] = ("reward", "eval_reward", "extension")

    overlap_safe: bool = False
    """For a reward with a state. True: with ``async_depth`` it may score beside the steps. The state in a checkpoint then
    counts exactly the groups that are not scored again after a resume; scoring pauses while the state is saved.
    """


@dataclass(slots=True)
class RunContext:
    """The argument of ``run_started``; read-only."""

    config: Mapping[str, Any]
    tokenizer: Any
    run_dir: Path | None
    seed: int
    roles: Mapping[str, RoleHandle]
    resumed: bool = False
    resume_step: int = 0
    """The step of the checkpoint from which a resumed run continues; -1 if there was no checkpoint yet."""
    steps: int | None = None
    """Steps of the whole run."""
    notices: tuple[str, ...] = ()
    """Messages for the user about the start: data that was read, filtered and truncated."""
    render: Callable[[Task], list[int]] | None = None
    """Function that gives the token ids of a task's ``prompt`` as the run renders it, with its tools: for plugins that change the
    prompt (``dataclasses.replace``). It raises ``UserError`` where the run would."""
    processes: Callable[[], Mapping[str, WeightSource]] | None = None
    """For runs that train, a function that gives what trains and samples now: ``trainer``, engines by name, and ``role NAME``, the
    engines of a frozen role. On the run's event loop, ``await each.run("package.module:function", **arguments)`` calls the function
    in each of its processes, with ``Weights`` or a ``Loader`` first, and returns results by rank. Arguments and results are plain
    values."""


class RoleHandle(Protocol):
    """A role as a plugin sees it: awaitable forward passes without gradient."""

    @property
    def tokenizer(self) -> Any:
        """The role's own tokenizer, loaded when it is first used."""

    @property
    def context_length(self) -> int:
        """Longest row, in tokens."""

    async def logprobs(self, trajectories: Sequence[Trajectory], *, temperature: float | None = None) -> list[list[float]]:
        """Returns, per trajectory, log-probabilities of its completion tokens, at the run's temperature or at another.

        Raises ``ValueError`` at temperature 0, where a distribution is greedy, and ``topk`` does, too.
        """

    async def topk(
        self, trajectories: Sequence[Trajectory], k: int, *, temperature: float | None = None
    ) -> list[list[dict[int, float]]]:
        """Returns, per trajectory and completion token, the ``k`` likeliest tokens with their log-probabilities, the likeliest
        first.
        """

    async def values(self, trajectories: Sequence[Trajectory]) -> list[list[float]]:
        """Returns, per trajectory, the scalar head at each completion token."""

    async def scores(self, trajectories: Sequence[Trajectory]) -> list[float]:
        """Returns, per trajectory, the scalar head where transformers reads it; see ``Outputs.scores``."""

    async def token_scores(self, trajectories: Sequence[Trajectory]) -> list[list[float]]:
        """Returns, per trajectory, the scalar head after each completion token; see ``Outputs.token_scores``."""


@dataclass(slots=True)
class ScoreContext:
    """The argument of ``score``: the split, and the step of the trajectories."""

    split: Literal["train", "eval"] = "train"
    step: int = 0
    roles: Mapping[str, RoleHandle] = field(default_factory=dict)
    tokenizer: Any = None


@dataclass(slots=True)
class Outcome:
    """End of the run, for ``run_finished``. ``load_run`` also knows ``running`` and ``killed``, and a dry run is ``planned``."""

    status: Literal["finished", "interrupted", "failed", "running", "killed", "planned"]
    step: int
    run_dir: Path | None = None
    error: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    reason: str | None = None
    """Reason for which a plugin ended the run early (``Stop``)."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Returned by ``step_finished`` to end the run after this step. Checkpoint and model are written as at a normal end."""

    reason: str


@dataclass(frozen=True, slots=True)
class Adjust:
    """Returned by ``step_finished`` to change settings from the next step on: ``ROLE.lr`` (the peak learning rate), or
    ``ALIAS.NAME``, which the hook ``adjust`` of the plugin ``ALIAS`` receives."""

    settings: Mapping[str, float]

    def __post_init__(self) -> None:
        if not isinstance(self.settings, Mapping):
            raise TypeError(f"Adjust takes names with their numbers, such as {{'actor.lr': 1e-6}}, not {self.settings!r}")
