"""Tasks, episodes, trajectories and what an engine answers. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

Message: TypeAlias = dict[str, Any]
"""One chat message, ``{"role": ..., "content": ...}``."""
FinishReason: TypeAlias = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Task:
    """One row to solve."""

    prompt: str | Sequence[Message]
    ground_truth: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    agent: str | None = None
    """Provisional: which of several agents plays it."""
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
    """Provisional: no run fills or reads it yet. The kept sampling set of each token."""
    routed_experts: Any = None
    """Provisional: no run fills or reads it yet. Expert routing of each token."""


@dataclass(slots=True)
class Reward:
    """What a reward plugin says of one trajectory. ``value`` is the whole; ``turns`` or ``tokens`` (over action tokens) say where
    it was earned, ``parts`` for what. Where ``value`` is not given, it is the sum of one of them.

    Raises ``ValueError`` where two of these disagree.
    """

    value: float | None = None
    turns: Sequence[float] | None = None
    tokens: Sequence[float] | None = None
    score: float | None = None
    """Success in [0, 1], the basis of pass@k and dynamic filtering."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    parts: Mapping[str, float] = field(default_factory=dict)
    """Several objectives of one judge, each a column ``ALIAS.PART`` of ``plugin_rewards``."""

    def __post_init__(self) -> None:
        if len(sums := self._sums()) > 1:
            low, high = min(sums.values()), max(sums.values())
            if high - low > 1e-6 * max(1.0, abs(low), abs(high)):
                shown = ", ".join(f"{name} {value:g}" for name, value in sums.items())
                raise ValueError(f"a reward disagrees with itself: {shown}; value is the sum of turns, of tokens and of parts")

    def _sums(self) -> dict[str, float]:
        """What was given, each as a sum."""
        placed = {"turns": self.turns, "tokens": self.tokens, "parts": self.parts.values() if self.parts else None}
        sums = {} if self.value is None else {"value": float(self.value)}
        return sums | {name: float(sum(values)) for name, values in placed.items() if values is not None}

    @property
    def total(self) -> float:
        return float(self.value) if self.value is not None else next(iter(self._sums().values()), 0.0)


@dataclass(frozen=True, slots=True)
class Unjudged:
    """In place of a reward: this trajectory could not be judged, and why."""

    reason: str


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
    parent: int | None = None
    """Of an agent that branches: the index of an earlier row of this episode, whose tokens this row's prompt begins with."""
    branch: int = 0
    """How many of the parent's tokens, its prompt among them, that are."""
    row: int = 0
    """Set by the host: the index of this row in its episode."""

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
    """Provisional: no run serves the policy over HTTP yet, so it is always ``None``."""
    sampling: Sampling
    """The run's own, for this split."""

    async def generate(self, token_ids: Sequence[int], sampling: Sampling | None = None) -> Generation: ...
