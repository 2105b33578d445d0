"""The nouns: what hooks receive and return. Nothing here imports torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

Message: TypeAlias = dict[str, Any]
"""One chat message, ``{"role": ..., "content": ...}``."""

FinishReason: TypeAlias = Literal["stop", "length", "abort"]
DataFormat: TypeAlias = Literal["prompts", "prompt_completion", "preference", "unpaired", "stepwise"]
Aggregation: TypeAlias = str
"""``token-mean``, ``sequence-mean-token-mean``, ``sequence-mean-token-sum``,
``sequence-mean-token-sum-over(L)`` or ``group-mean-token-mean``."""


# --- tasks and episodes -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Task:
    """One row to solve."""

    prompt: str | Sequence[Message]
    ground_truth: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    agent: str | None = None
    index: int = 0
    """Position in its data source, stable across runs."""
    source: str = ""
    """Name of the data source, for metrics per source."""
    prompt_ids: tuple[int, ...] | None = None
    """The rendered and tokenised prompt, where the loader has made it."""


@dataclass(slots=True)
class Episode:
    """One agent working on one task once. ``state`` is the agent's own."""

    episode_id: str
    group_id: str
    task: Task
    sample: int = 0
    """Which of the group's ``n`` episodes this is."""
    seed: int = 0
    turn: int = 0
    split: Literal["train", "eval"] = "train"
    state: Any = None


@dataclass(slots=True)
class Segment:
    """A run of tokens with one origin; action segments carry what the sampler knew."""

    kind: Literal["prompt", "action", "observation"]
    token_ids: list[int]
    logprobs: list[float] | None = None
    """Per token, under the distribution it was sampled from (temperature and truncation included)."""
    versions: list[int] | None = None
    """Per token, the weight version that sampled it."""
    support: Any = None
    """Reserved: the kept sampling set of each token."""
    routed_experts: Any = None
    """Reserved: expert routing of each token."""


@dataclass(slots=True)
class Reward:
    """What a reward plugin says of one trajectory. ``value`` is the whole; ``turns`` or ``tokens`` (over
    action tokens) place it, and their sum is the value when ``value`` is not given."""

    value: float | None = None
    turns: Sequence[float] | None = None
    tokens: Sequence[float] | None = None
    score: float | None = None
    """Success in [0, 1], the basis of pass@k and dynamic filtering."""
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        if self.value is not None:
            return float(self.value)
        return float(sum(self.turns if self.turns is not None else self.tokens or ()))


@dataclass(slots=True)
class Trajectory:
    """Ordered segments of one episode; tokens are only ever appended. Text is decoded on demand."""

    episode_id: str
    group_id: str
    task: Task
    segments: list[Segment]
    finish_reason: FinishReason = "stop"
    sample: int = 0
    rewards: dict[str, Reward | None] = field(default_factory=dict)
    """Per reward plugin alias; ``None`` means it could not judge."""
    agent_rewards: list[float | None] = field(default_factory=list)
    """Per turn, from ``Step.reward``; they count as the plugin ``agent``."""
    reward: float | None = None
    """Weighted sum over plugins; ``None`` when unjudged."""
    score: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    unjudged_reason: str | None = None
    decode: Callable[[Sequence[int]], str] | None = field(default=None, repr=False, compare=False)
    """Set by the host: token ids to text, special tokens left out."""
    advantage: float | None = None
    """Mean over the tokens in the loss, once advantages are computed; ``None`` where no token is."""

    @property
    def prompt_ids(self) -> list[int]:
        return self.segments[0].token_ids if self.segments and self.segments[0].kind == "prompt" else []

    @property
    def completion(self) -> list[Segment]:
        """Everything after the first prompt."""
        return self.segments[1:] if self.segments and self.segments[0].kind == "prompt" else self.segments

    @property
    def actions(self) -> list[Segment]:
        return [segment for segment in self.segments if segment.kind == "action"]

    @property
    def action_length(self) -> int:
        return sum(len(segment.token_ids) for segment in self.actions)

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"

    @property
    def prompt_text(self) -> str:
        return self._text(self.prompt_ids)

    @property
    def text(self) -> str:
        """The policy's own words: all action segments, joined."""
        return "".join(self._text(segment.token_ids) for segment in self.actions)

    @property
    def last_text(self) -> str:
        """The last action segment's text: the answer in a multi-turn episode."""
        actions = self.actions
        return self._text(actions[-1].token_ids) if actions else ""

    @property
    def full_text(self) -> str:
        """Actions and observations after the prompt, as one text."""
        return self._text([token for segment in self.completion for token in segment.token_ids])

    def _text(self, token_ids: Sequence[int]) -> str:
        if self.decode is None:
            raise ValueError(f"trajectory {self.episode_id} has no decoder: text is available inside a run")
        return self.decode(token_ids)


@dataclass(slots=True)
class Group:
    """The episodes of one task, linked by ``group_id``."""

    group_id: str
    task: Task
    trajectories: list[Trajectory]


@dataclass(frozen=True, slots=True)
class Drop:
    """``keep_group`` says no, and why; reasons are counted and shown."""

    reason: str


# --- agents and generation ----------------------------------------------------------------------


@dataclass(slots=True)
class Step:
    """What an environment answers. From ``agent_reset`` an ``observation`` of ``None`` means the task's own prompt."""

    observation: str | Sequence[Message] | Sequence[int] | None = None
    reward: float | None = None
    done: bool = False
    score: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


class Action:
    """What the policy just said: given to ``agent_step``. ``text`` is decoded when it is asked for."""

    __slots__ = ("_decode", "_text", "finish_reason", "token_ids")

    def __init__(
        self,
        text: str | None,
        token_ids: list[int],
        finish_reason: FinishReason,
        decode: Callable[[Sequence[int]], str] | None = None,
    ):
        self._text = text
        self.token_ids = token_ids
        self.finish_reason = finish_reason
        self._decode = decode

    @property
    def text(self) -> str:
        if self._text is None:
            self._text = self._decode(self.token_ids) if self._decode else ""
        return self._text


class EpisodeFailed(Exception):
    """Raised by an agent hook: the episode cannot be finished, for a reason that is not the policy's fault."""

    def __init__(self, reason: str, retryable: bool = False):
        super().__init__(reason)
        self.reason = reason
        self.retryable = retryable


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. ``top_k = 0``, ``top_p = 1`` and ``min_p = 0`` leave the distribution whole."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()

    @property
    def truncates(self) -> bool:
        """True when some tokens of the vocabulary cannot be drawn."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


SampleKey: TypeAlias = tuple[int, ...]
"""``(seed, split, source hash, task index, epoch, sample, turn)`` or alike: fixes a request's uniforms, whatever the batch."""


@dataclass(slots=True)
class Generation:
    """What an engine answers: ``token_ids`` with, per token, the sampled log-probability and weight version."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason


class Policy(Protocol):
    """The policy as an agent that owns its loop sees it (``agent_run``)."""

    base_url: str | None

    async def generate(self, token_ids: Sequence[int], sampling: Sampling | None = None) -> Generation: ...


# --- what plugins declare -----------------------------------------------------------------------


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


# --- tensors ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Experience:
    """Groups as tensors, ``[B, T]`` over the completion region (everything after the first prompt), right-padded.

    Float tensors are float32, masks bool, ids int64. Padding is 0 (``turn_ids``: -1). Rows of one group need not be adjacent.
    The same class is the ``batch`` of worker hooks, with fewer rows and a shorter ``T``.
    """

    prompt_ids: list[list[int]]
    completion_ids: Tensor
    """``[B, T]`` int64."""
    completion_mask: Tensor
    """``[B, T]`` bool: real tokens, observations included."""
    action_mask: Tensor
    """``[B, T]`` bool: tokens the policy sampled."""
    loss_mask: Tensor
    """``[B, T]`` bool: ``action_mask`` and every ``loss_masks`` hook."""
    turn_ids: Tensor
    """``[B, T]`` int64: which turn an action token belongs to; -1 elsewhere."""
    group_id: Tensor
    """``[B]`` int64, unique in the batch."""
    episode_id: Tensor
    """``[B]`` int64: an episode's several trajectories share it."""
    unit_id: Tensor
    """``[B]`` int64: rows that must stay in one micro-batch share it."""
    task_index: Tensor
    """``[B]`` int64."""
    truncated: Tensor
    """``[B]`` bool: cut by length."""
    rewards: Tensor
    """``[B]``: the weighted sum over reward plugins, after ``transform_rewards``."""
    plugin_rewards: Tensor
    """``[B, K]``: raw reward per plugin, in the order of ``reward_names``."""
    scores: Tensor
    """``[B]``: 0-1 scores, NaN where none was given."""
    token_rewards: Tensor
    """``[B, T]``: the scored reward on the last action token (of each turn, where it is per turn)."""
    sampler_logprobs: Tensor
    """``[B, T]``: log μ, 0 outside ``action_mask``."""
    versions: Tensor
    """``[B, T]`` int64: weight version of each action token."""
    reward_names: tuple[str, ...] = ()
    reward_weights: tuple[float, ...] = ()
    """Weight of each of ``reward_names`` in ``rewards``."""
    shaped: Tensor | None = None
    """``[B, T]``: sum of ``shape_rewards`` (KL); zeros when there is none."""
    old_logprobs: Tensor | None = None
    """``[B, T]``: log π_old; ``None`` in ``fused`` mode, where it is the detached π of the same forward."""
    logprobs: dict[str, Tensor] = field(default_factory=dict)
    """role → ``[B, T]``."""
    values: dict[str, Tensor] = field(default_factory=dict)
    """role → ``[B, T]``: the critic before token t."""
    bootstrap_value: Tensor | None = None
    """``[B]``: the critic after the last token; only where ``needs().outputs`` has ``ROLE.bootstrap``."""
    advantages: Tensor | None = None
    returns: Tensor | None = None
    step: int = 0
    max_new_tokens: int = 0
    temperature: float = 1.0
    stats: dict[str, float] = field(default_factory=dict)
    """Reduced ``batch_statistics``."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What a plugin wants its worker hooks to see, under its name. Tensors with ``B`` rows are sliced with the batch."""
    trajectories: list[Trajectory] = field(default_factory=list, repr=False)
    """The rows as records (controller only; empty in worker hooks)."""

    def __len__(self) -> int:
        return len(self.prompt_ids)

    @property
    def lengths(self) -> Tensor:
        """``[B]`` int64: completion tokens per row."""
        return self.completion_mask.sum(-1)

    def select(self, rows: Sequence[int], *, trim: bool = True) -> Experience:
        """The given rows, in that order; ``trim`` cuts ``T`` to the longest of them."""
        index = self.group_id.new_tensor(list(rows))
        count, width = len(self), self.completion_ids.shape[1]
        length = int(self.completion_mask.index_select(0, index).sum(-1).max()) if trim and len(index) else 0 if trim else width

        def cut(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: cut(item) for name, item in value.items()}
            if not hasattr(value, "shape") or not value.shape or value.shape[0] != count:
                return value
            value = value.index_select(0, index)
            return value[:, :length] if value.dim() > 1 and value.shape[1] == width else value

        changed = {f.name: cut(getattr(self, f.name)) for f in dataclasses.fields(self)}
        changed["plugin_rewards"] = self.plugin_rewards.index_select(0, index)
        changed["prompt_ids"] = [self.prompt_ids[i] for i in rows]
        changed["trajectories"] = [self.trajectories[i] for i in rows] if self.trajectories else []
        return Experience(**changed)


@dataclass(slots=True)
class Outputs:
    """What a role's forward pass gave for the rows of a batch."""

    logprobs: Tensor | None = None
    """``[B, T]`` fp32, with gradient: log-softmax of ``logits / temperature`` at the completion tokens; 0 at padding."""
    entropy: Tensor | None = None
    """``[B, T]`` fp32: of the full vocabulary at the same temperature; detached unless ``needs().outputs`` has ``entropy``."""
    values: Tensor | None = None
    """``[B, T]`` fp32: scalar head at the position that predicts token t."""
    scores: Tensor | None = None
    """``[B]`` fp32: scalar head at the last token."""
    logits: Tensor | None = None
    """``[B, T, V]``: only where ``needs().outputs`` has ``logits``."""


@dataclass(slots=True)
class Metric:
    """A number on its way to the step's metrics. ``values`` is any shape; ``mask`` (same shape) says what counts.

    ``mean`` and ``sum`` are over all counted elements of the optimizer batch, whatever the split; ``min`` and ``max`` likewise.
    ``ess`` is the effective sample size of weights as a fraction, ``(Σw)²/(N·Σw²)``: 1 when all are equal, 0 when all are 0.
    """

    name: str
    values: Tensor | float
    mask: Tensor | None = None
    reduce: Literal["mean", "sum", "min", "max", "ess"] = "mean"


@dataclass(slots=True)
class LossTerm:
    """An unreduced loss; the host reduces it over the whole optimizer batch.

    ``mask`` names a mask of the batch (``loss_mask``, ``action_mask``, ``completion_mask``, or ``extra.NAME``), known before the
    first forward. ``values`` is ``[B, T]``, or ``[B]`` (rows count by whether the mask has any element).
    What depends on ``outputs`` becomes zeros in ``values`` and stays in the denominator.
    """

    name: str
    values: Tensor
    mask: str = "loss_mask"
    coefficient: float = 1.0
    aggregation: Aggregation = "token-mean"
    corrected: bool = False
    """True for policy terms: the host multiplies ``importance_weights`` in."""


@dataclass(slots=True)
class Advantages:
    """``advantages`` and optional ``returns``, ``[B, T]`` float32."""

    advantages: Tensor
    returns: Tensor | None = None
    metrics: list[Metric] = field(default_factory=list)


LossItems: TypeAlias = Iterable["LossTerm | Metric"] | Iterator["LossTerm | Metric"]


@dataclass(slots=True)
class SyncTarget:
    """One engine as ``sync_connect`` sees it."""

    name: str
    engine: Any


@dataclass(slots=True)
class Outcome:
    """How the run ended, for ``run_finished``."""

    status: Literal["finished", "interrupted", "failed"]
    step: int
    run_dir: Path | None = None
    error: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
