"""Tasks, episodes and trajectories. Nothing here imports torch."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from rlhf_host.errors import in_one_line, place_of
from rlhf_host.records.generations import FinishReason, Generation, Sampling
from rlhf_host.records.generations import SampleKey as SampleKey
from rlhf_host.records.pictures import Picture

if TYPE_CHECKING:
    from rlhf_host.records.endpoints import Endpoint
    from rlhf_host.records.messages import Reply

Message: TypeAlias = dict[str, Any]
"""One chat message, ``{"role": ..., "content": ...}``."""


@dataclass(frozen=True, slots=True)
class Task:
    """One problem to solve."""

    prompt: str | Sequence[Message]
    ground_truth: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    agent: str | None = None
    """Provisional: alias of the agent that plays it, if a run has several; default: the first."""
    index: int = 0
    """Position in its data source, stable across runs."""
    source: str = ""
    """Name of the data source, for metrics per source."""
    prompt_ids: tuple[int, ...] | None = None
    """The rendered and tokenised prompt, if the loader has computed it."""
    tools: Sequence[Any] | None = None
    """Tools from its row; they are in the prompt."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Values from its row for the chat template."""
    images: Sequence[Any] = ()
    """Provisional: pictures of the prompt: paths, bytes, data URIs or ``PIL.Image``. They take the places of its parts
    ``{"type": "image"}``, or of the text ``<image>``; without either they come first. In a run they are ``Picture``, in the order
    of ``prompt_ids``."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Raises an error for a field that is not here, and tells what the field is called."""
            meant = {"label": "ground_truth", "answer": "ground_truth", "question": "prompt", "messages": "prompt"}.get(name)
            raise AttributeError(f"task.{name} does not exist{f': it is task.{meant}' if meant else ''}", name=name, obj=self)


OF_HOST = ("call", "ignored", "retry")
"""Kinds of events that the host counts."""


@dataclass(slots=True)
class Episode:
    """One attempt of an agent at one task. ``state`` belongs to the agent."""

    episode_id: str
    group_id: str
    task: Task
    sample: int = 0
    """Index of this episode among the group's ``n``."""
    seed: int = 0
    turn: int = 0
    split: Literal["train", "eval"] = "train"
    state: Any = None
    events: list[dict[str, Any]] = field(default_factory=list, repr=False)
    """Events for the log of trajectories: ``kind``, ``t`` in seconds since the episode began, and JSON values."""
    began: float = field(default_factory=time.monotonic, repr=False)

    def log(self, kind: str, **values: Any) -> None:
        """Adds something to the log, such as a tool's result. Attempts of an episode share the log. Raises ``ValueError`` for a
        value that contains itself or is nested too deeply, for one called ``t``, and for the kinds of events that the host adds
        itself: ``call``, ``ignored`` and ``retry``.
        """
        if kind in OF_HOST or "t" in values:
            raise ValueError(
                f"episode.log of {kind!r}: {kind if kind in OF_HOST else 't'} is the host's own: choose another name"
            )
        self._note(kind, **values)

    def _note(self, kind: str, **values: Any) -> None:
        """Does the same as ``log``, for the host."""
        try:
            json.dumps(values, default=str, skipkeys=True)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"episode.log of {kind!r}: {error}") from error
        self.events.append({"kind": kind, "t": round(time.monotonic() - self.began, 6), **values})


@dataclass(slots=True)
class Segment:
    """A sequence of tokens with one origin. Action segments also have log-probabilities and versions."""

    kind: Literal["prompt", "action", "observation"]
    token_ids: Sequence[int]
    logprobs: Sequence[float] | None = None
    """Per token, in the distribution that it was sampled from (after temperature and truncation)."""
    versions: Sequence[int] | None = None
    """Per token, the weight version that sampled it."""
    columns: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Numbers per token that came with the data; they become ``batch.token_columns``."""
    images: Sequence[Picture] = ()
    """Provisional: the pictures that some of its tokens stand for, in order."""


@dataclass(slots=True)
class Reward:
    """The result of a reward plugin for one trajectory. ``value`` is the total. ``turns`` or ``tokens`` (over action tokens) place
    it, and ``parts`` splits it by objective. Without ``value``, the total is the sum of one of these.

    Raises ``ValueError`` if two of these disagree.
    """

    value: float | None = None
    turns: Sequence[float] | None = None
    tokens: Sequence[float] | None = None
    score: float | None = None
    """Success in [0, 1]; pass@k and dynamic filtering use it."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    parts: Mapping[str, float] = field(default_factory=dict)
    """Several objectives of one plugin; each becomes a column ``ALIAS.PART`` of ``plugin_rewards``."""
    feedback: str | None = None
    """Reasons in words, for people and for algorithms that learn from them: a failed test, an error, a judge's comment."""

    def __post_init__(self) -> None:
        if len(sums := self._sums()) > 1:
            low, high = min(sums.values()), max(sums.values())
            if high - low > 1e-6 * max(1.0, abs(low), abs(high)):
                shown = ", ".join(f"{name} {value:g}" for name, value in sums.items())
                raise ValueError(f"a reward disagrees with itself: {shown}; value is the sum of turns, of tokens and of parts")

    def _sums(self) -> dict[str, float]:
        """Returns the given values, each as a sum."""
        placed = {"turns": self.turns, "tokens": self.tokens, "parts": self.parts.values() if self.parts else None}
        sums = {} if self.value is None else {"value": float(self.value)}
        return sums | {name: float(sum(values)) for name, values in placed.items() if values is not None}

    @property
    def total(self) -> float:
        return float(self.value) if self.value is not None else next(iter(self._sums().values()), 0.0)


@dataclass(frozen=True, slots=True)
class Unjudged:
    """Returned in place of a reward: the trajectory could not be scored, for this reason."""

    reason: str


class Failed(Unjudged):
    """The same where a plugin failed at this trajectory: it may be asked again."""

    @classmethod
    def by(cls, error: BaseException) -> Failed:
        return cls(in_one_line(error) + place_of(error))


@dataclass(slots=True)
class Trajectory:
    """The segments of one episode in order. Tokens are only appended. Text is decoded on demand. An episode may give several."""

    episode_id: str
    group_id: str
    task: Task
    segments: list[Segment]
    finish_reason: FinishReason = "stop"
    sample: int = 0
    rewards: dict[str, Reward | None] = field(default_factory=dict)
    """Per alias of a reward plugin; ``None``: it could not score the trajectory."""
    agent_rewards: list[float | None] = field(default_factory=list)
    """Per turn, from ``Step.reward``; they count as the plugin ``agent``."""
    reward: float | None = None
    """Weighted sum over plugins; ``None`` if unjudged."""
    score: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    unjudged_reason: str | None = None
    decode: Callable[[Sequence[int]], str] | None = field(default=None, repr=False, compare=False)
    """Set by the host: converts token ids to text, without special tokens."""
    advantage: float | None = None
    """Mean over the tokens in the loss, after advantages are computed; ``None`` if no token is in the loss."""
    parent: int | None = None
    """For agents that branch: the index of an earlier row of this episode. This row's prompt begins with tokens of that row."""
    branch: int = 0
    """The number of these tokens, including the parent's prompt."""
    row: int = 0
    """Set by the host: the index of this row in its episode."""
    columns: Mapping[str, float] = field(default_factory=dict)
    """Numbers that came with the data, such as ``label``; they become ``batch.columns``."""
    role: str = ""
    """Role of the row, if several take part in an episode: the seats of a game, a planner and a writer. Baselines compare only
    rows of one role.
    """
    final: bool = True
    """True if the row has the answer. Rewards judge such rows; other rows of the episode, such as those of a sub-agent, get the
    reward of the final rows of their role, or else of the episode.
    """
    events: Sequence[Mapping[str, Any]] = ()
    """Set by the host in an episode's first row: the calls of the policy if there were several, and the log of its agent."""
    advantages: Sequence[float] | None = field(default=None, repr=False, compare=False)
    """Set by the host if they differ between the tokens in the loss: ``[T]``, of all completion tokens."""
    trainer_logprobs: Sequence[float] | None = field(default=None, repr=False, compare=False)
    """Set by the host if the trainer computes log-probabilities before the update: ``[T]``, of all completion tokens. Their
    difference from those of the segments comes from the mismatch with the sampler, and from the age of the tokens.
    """
    traces: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """Provisional: ``Generation.traces`` of the whole row, as each token was first read: name → array ``[tokens - 1, ...]``."""

    @property
    def prompt_ids(self) -> Sequence[int]:
        return self.segments[0].token_ids if self.segments and self.segments[0].kind == "prompt" else []

    @property
    def images(self) -> tuple[Picture, ...]:
        """The pictures of all segments, in the order of their tokens."""
        return tuple(picture for segment in self.segments for picture in segment.images)

    @property
    def shown(self) -> tuple[tuple[int, Picture], ...]:
        """The same, each with the place where its segment begins."""
        begins = accumulate((len(segment.token_ids) for segment in self.segments), initial=0)
        parts = zip(begins, self.segments, strict=False)
        return tuple((begin, picture) for begin, segment in parts for picture in segment.images)

    @property
    def completion(self) -> list[Segment]:
        """Everything after the first prompt."""
        return self.segments[1:] if self.segments and self.segments[0].kind == "prompt" else self.segments

    @property
    def actions(self) -> list[Segment]:
        return [segment for segment in self.segments if segment.kind == "action"]

    @property
    def sampled(self) -> bool:
        """True if a policy sampled it; False for a row of a data set."""
        return any(segment.logprobs is not None for segment in self.actions)

    @property
    def action_length(self) -> int:
        return sum(len(segment.token_ids) for segment in self.actions)

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"

    @property
    def failed(self) -> bool:
        """True if it stands for an episode that could not be finished."""
        return (self.unjudged_reason or "").startswith(FAILED)

    @property
    def prompt_text(self) -> str:
        return self._text(self.prompt_ids)

    @property
    def text(self) -> str:
        """Everything that the policy wrote: the text of all action segments."""
        return "".join(self._text(segment.token_ids) for segment in self.actions)

    @property
    def last_text(self) -> str:
        """The text of the last action segment: the answer in an episode of several turns."""
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
    """Returned by ``keep_group`` to drop a group. Reasons are counted and shown."""

    reason: str


@dataclass(slots=True)
class Step:
    """The answer of an environment. From ``agent_reset``, ``observation=None`` means the task's own prompt."""

    observation: str | Sequence[Message] | Sequence[int] | None = None
    reward: float | None = None
    done: bool = False
    score: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] | None = None
    """JSON schemas of the tools that the policy has. From ``agent_reset`` they go into the prompt."""


class Action:
    """The policy's last answer, passed to ``agent_step``. ``text`` and ``message`` are decoded when they are read."""

    def __init__(
        self,
        text: str | None,
        token_ids: Sequence[int],
        finish_reason: FinishReason,
        decode: Callable[[Sequence[int]], str] | None = None,
        parse: Callable[[], Reply] | None = None,
    ):
        self.token_ids, self.finish_reason = token_ids, finish_reason
        self._text, self._decode, self._parse = text, decode, parse

    @cached_property
    def text(self) -> str:
        decoded = self._decode(self.token_ids) if self._text is None and self._decode else self._text
        return decoded or ""

    @cached_property
    def message(self) -> Reply:
        """The answer as a message: its content, reasoning and tool calls. Raises ``ValueError`` outside a run."""
        if self._parse is None:
            raise ValueError("this action has no parser: messages are read inside a run")
        return self._parse()


FAILED = "failed: "
"""Start of the ``unjudged_reason`` of a row that represents an episode which could not be finished: a prompt, and nothing
sampled.
"""


class EpisodeFailed(Exception):
    """Raised by an agent hook if the episode cannot be finished, and the policy is not the reason."""

    def __init__(self, reason: str, retryable: bool = False):
        super().__init__(reason)
        self.reason = reason
        self.retryable = retryable
        self.kind = ""
        """Set by the host if a hook failed with another error: ``AGENT:TYPE``, for the metrics."""


class NoRoom(EpisodeFailed):
    """The conversation fills ``rollout.max_tokens``: the policy cannot say anything more."""


class Policy(Protocol):
    """The policy, for agents that run their own loop (``agent_run``). It keeps every call with its tokens."""

    sampling: Sampling
    """The settings of the run for this split."""
    max_tokens: int
    """Longest row, prompt included."""
    tokenizer: Any

    async def generate(self, token_ids: Sequence[int], sampling: Sampling | None = None) -> Generation:
        """Returns the policy's answer after ``token_ids``.

        Args:
            sampling: default: ``self.sampling``. It may ask for fewer tokens and for more stops: change a copy
                (``dataclasses.replace``). In training nothing else may differ, because trained tokens must come from the run's
                own distribution.

        Raises:
            NoRoom: ``rollout.max_tokens`` leaves no room for another token. It is an ``EpisodeFailed``.
            ValueError: in training, for another distribution than the run's.
        """

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        max_new_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Reply:
        """Returns the policy's next message in a conversation. Append ``reply.message`` and go on: earlier answers stay the
        tokens that were sampled. If the conversation or the tools are changed, a new row begins.

        Args:
            messages: in the form of OpenAI's chat completions, including tool calls and results.
            tools: JSON schemas, as from ``transformers.utils.get_json_schema``.
            max_new_tokens: at most the run's.
            stop: texts that end the answer, in addition to the run's.

        Raises:
            NoRoom: ``rollout.max_tokens`` leaves no room for another token. It is an ``EpisodeFailed``.
            UserError: the conversation ends with the assistant's own message.
            EpisodeFailed: the chat template cannot express something.
        """

    def fork(self, role: str = "", *, trainable: bool = True) -> Policy:
        """Returns the policy with a new tree: for a sub-agent, or another seat of a game. Its rows have the role; without
        ``trainable`` it has no rows. Its rows are final if the policy itself has none. Otherwise they get the policy's reward,
        or the rewards that the agent gives them (``agent_rewards``).
        """

    def role(self, name: str) -> Policy:
        """Returns a frozen model, as an opponent or a user to talk to, with its own conversation tree. It is never trained, and
        samples as requested. The plugin declares it: ``Needs(roles=(RoleNeed("opponent", generates=True),))``. Raises
        ``ValueError`` for another name.
        """

    async def endpoint(self) -> Endpoint:
        """Returns a base URL for the policy that OpenAI's clients understand, valid as long as the episode lasts. Its calls are
        in the same tree. Raises ``PluginError`` without a server (the package ``rlhf-server``).
        """

    def trajectories(self, final: str | None = None) -> list[Trajectory]:
        """Returns the rows of all calls so far, those of forks too. Every sampled token is an action in exactly one. The row
        with the last answer is final; if only forks answered, one row of each role is. With ``final``, the ``call_id`` of an
        answer, the row with that answer is.
        """
