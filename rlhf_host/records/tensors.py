"""Batches of rows as tensors, losses and metrics. torch is imported with the first tensor, not here."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TypeAlias

from rlhf_host.records.by_role import OfRoles
from rlhf_host.records.episodes import Trajectory
from rlhf_host.records.generations import SUPPORT
from rlhf_host.records.pictures import Picture

if TYPE_CHECKING:
    from torch import Tensor

AGGREGATIONS = ("token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "group-mean-token-mean")
_SUM_OVER = re.compile(r"sequence-mean-token-sum-over\((\d+(?:\.\d+)?)\)")


@dataclass(frozen=True, slots=True)
class Aggregation:
    """Reduction of token losses to one number. ``length`` divides the sums of ``sequence-mean-token-sum`` by a constant.

    Raises ``ValueError`` for an unknown name, or a length that is not above 0.
    """

    name: str
    length: float | None = None

    def __post_init__(self) -> None:
        lengthy = self.length is None or (self.name == "sequence-mean-token-sum" and self.length > 0)
        if self.name not in AGGREGATIONS or not lengthy:
            raise ValueError(f"aggregation is one of {', '.join(AGGREGATIONS)}, sequence-mean-token-sum-over(L) with L > 0")

    @classmethod
    def parse(cls, text: str) -> Aggregation:
        """Parses the form of options and command lines, such as ``sequence-mean-token-sum-over(256)``."""
        match = _SUM_OVER.fullmatch(text)
        return cls("sequence-mean-token-sum", float(match[1])) if match else cls(text)

    def __str__(self) -> str:
        return self.name if self.length is None else f"{self.name}-over({self.length:g})"


TOKEN_MEAN = Aggregation("token-mean")
SEQUENCE_MEAN_TOKEN_MEAN = Aggregation("sequence-mean-token-mean")
SEQUENCE_MEAN_TOKEN_SUM = Aggregation("sequence-mean-token-sum")
GROUP_MEAN_TOKEN_MEAN = Aggregation("group-mean-token-mean")


@dataclass(frozen=True, slots=True)
class Mask:
    """A mask ``[B, T]`` that every batch has: ``LOSS``, ``ACTION`` or ``COMPLETION``."""

    name: str


@dataclass(frozen=True, slots=True)
class Extra(Mask):
    """A bool mask ``[B, T]`` that the plugin's own ``prepare_batch`` returned as ``name``."""


LOSS = Mask("loss_mask")
ACTION = Mask("action_mask")
COMPLETION = Mask("completion_mask")


class TopK(NamedTuple):
    """The likeliest tokens of a role at every completion token, the likeliest first; 0 at padding."""

    logprobs: Tensor
    """``[B, T, k]`` float32."""
    ids: Tensor
    """``[B, T, k]`` int64."""


@dataclass(slots=True, kw_only=True)
class Batch:
    """Rows for workers and their hooks: right-padded tensors ``[B, T]`` over the completion region (everything after the first
    prompt).

    Float tensors are float32, masks bool, ids int64. Padding is 0 (``turn_ids``: -1). Rows of one group need not be adjacent.
    """

    prompt_ids: Sequence[Sequence[int]]
    completion_ids: Tensor
    """``[B, T]`` int64."""
    completion_mask: Tensor
    """``[B, T]`` bool: all tokens, also observations; no padding."""
    action_mask: Tensor
    """``[B, T]`` bool: tokens the policy sampled."""
    loss_mask: Tensor
    """``[B, T]`` bool: ``action_mask`` combined with every ``loss_masks`` hook."""
    turn_ids: Tensor
    """``[B, T]`` int64: the turn of each action token; -1 elsewhere."""
    group_id: Tensor
    """``[B]`` int64, unique in the batch."""
    episode_id: Tensor
    """``[B]`` int64: equal for all trajectories of an episode."""
    unit_id: Tensor
    """``[B]`` int64: equal for the rows of an episode, or of a pair of a data set; see ``AlgoNeeds.unit_rows``."""
    task_index: Tensor
    """``[B]`` int64."""
    truncated: Tensor
    """``[B]`` bool: cut off by a length limit."""
    sampler_logprobs: Tensor
    """``[B, T]``: log μ, 0 outside ``action_mask``; NaN where it is unknown, as in rows of a data set: see ``sampled_mask``."""
    versions: Tensor
    """``[B, T]`` int64: version of the weights that sampled each action token."""
    version: int = 0
    """Version of the weights at the start of the step."""
    old_logprobs: Tensor | None = None
    """``[B, T]``: log π_old; ``None`` in ``fused`` mode, where it is the detached log π of the same forward pass."""
    logprobs: dict[str, Tensor] = field(default_factory=dict)
    """role → ``[B, T]``."""
    values: dict[str, Tensor] = field(default_factory=dict)
    """role → ``[B, T]``: the critic before token t."""
    bootstrap: dict[str, Tensor] = field(default_factory=dict)
    """role → ``[B]``: the critic after the last token."""
    distributions: dict[str, TopK] = field(default_factory=dict)
    """role → its likeliest tokens; ``outputs.others`` also has the pass's own log-probabilities at these tokens."""
    advantages: Tensor | None = None
    returns: Tensor | None = None
    step: int = 0
    max_new_tokens: int = 0
    temperature: float = 1.0
    stats: dict[str, float] = field(default_factory=dict)
    """Reduced ``batch_statistics``."""
    columns: dict[str, Tensor] = field(default_factory=dict)
    """name → ``[B]``: ``Trajectory.columns``, NaN for rows without it; a preference's ``label`` is 1 (chosen) or 0, and a
    triple's third row has ``gold`` 1."""
    token_columns: dict[str, Tensor] = field(default_factory=dict)
    """name → ``[B, T]``: ``Segment.columns``, NaN for tokens without it."""
    extra: dict[str, dict[str, Any]] = field(default_factory=dict)
    """alias of a plugin → the result of its ``prepare_batch``. Tensors with ``B`` rows are sliced with the batch."""
    images: Sequence[Sequence[tuple[int, Picture]]] | None = None
    """Provisional: the pictures of each row, in the order of their tokens, each after the place where its segment begins;
    ``None``: no row of the whole batch has any."""
    own: Mapping[str, Any] = field(default_factory=dict)
    """In a worker hook: the result of the same plugin's ``prepare_batch``, under any alias."""
    traces: Sequence[Mapping[str, Any]] | None = None
    """Provisional: ``Trajectory.traces`` of each row; ``None``: no row of the whole batch has any."""
    prompts: dict[str, Sequence[Sequence[int]]] = field(default_factory=dict)
    """role → the prompts under which it sees the rows, where a plugin has rewritten them (``rewrite_prompts``)."""
    entropy: dict[str, Tensor] = field(default_factory=dict)
    """role → ``[B, T]``: the entropy of its distribution of each token, before the step."""
    collision: dict[str, Tensor] = field(default_factory=dict)
    """role → ``[B, T]``: ``Σ p²`` over its distribution of each token, before the step: how likely two draws are equal."""
    rows: dict[str, Batch] = field(default_factory=dict)
    """role → the rows in its own tokens (``rewrite_rows``), ``[B, T']``, with what is computed of it before the step."""

    def __post_init__(self) -> None:
        for name in ("logprobs", "values", "bootstrap", "distributions", "entropy", "collision"):
            if (values := getattr(self, name)) is not None:  # as in a part of a batch that is on its way
                setattr(self, name, OfRoles(f"batch.{name}", name.replace("distributions", "distribution"), values))

    def __len__(self) -> int:
        return len(self.prompt_ids)

    @property
    def lengths(self) -> Tensor:
        """``[B]`` int64: completion tokens per row."""
        return self.completion_mask.sum(-1)

    @property
    def sampled_mask(self) -> Tensor:
        """``[B, T]`` bool: the action tokens whose sampler's log-probability is known. Others have no ratio to it."""
        return self.action_mask & self.sampler_logprobs.isfinite()

    def batch(self) -> Batch:
        """Returns the part of it that workers get."""
        return Batch(**{f.name: getattr(self, f.name) for f in dataclasses.fields(Batch)})

    def seen_by(self, role: str) -> Batch:
        """Returns the batch as the role sees it: in its own tokens, or after the prompts that a plugin wrote for it."""
        if role not in self.prompts:
            return self.rows.get(role, self)
        traces = self.traces and [{name: own[name] for name in own.keys() & {SUPPORT}} for own in self.traces]
        return dataclasses.replace(self, prompt_ids=self.prompts[role], traces=traces)

    def map(self, change: Callable[[str, Any], Any]) -> Self:
        """Returns a copy with ``change(field, tensor)`` in place of every tensor."""

        def walk(name: str, value: Any) -> Any:
            if isinstance(value, Mapping):
                return {key: walk(name, item) for key, item in value.items()}
            if isinstance(value, TopK):
                return TopK(*(walk(name, item) for item in value))
            if isinstance(value, Batch):
                return value.map(change)
            return change(name, value) if hasattr(value, "shape") else value

        return type(self)(**{f.name: walk(f.name, getattr(self, f.name)) for f in dataclasses.fields(self)})

    def select(self, rows: Sequence[int], *, trim: bool = True) -> Self:
        """Returns the given rows, in that order; ``trim`` cuts ``T`` to the longest of them."""
        from rlhf_host.records.ragged import RaggedTensor

        index = self.group_id.new_tensor(list(rows))
        count, width = len(self), self.completion_ids.shape[1]
        length = int(self.completion_mask.index_select(0, index).sum(-1).max()) if trim and len(index) else 0 if trim else width

        def cut(name: str, value: Any) -> Any:
            if not value.shape or value.shape[0] != count:
                return value
            timed = value.dim() > 1 and value.shape[1] == width and name != "plugin_rewards"
            if isinstance(value, RaggedTensor):
                return value.select_rows(rows, length)
            value = value.index_select(0, index)
            return value[:, :length] if timed else value

        part = dataclasses.replace(self, rows={}).map(cut)
        part.prompt_ids = [self.prompt_ids[i] for i in rows]
        part.images = None if self.images is None else [self.images[i] for i in rows]
        part.traces = None if self.traces is None else [self.traces[i] for i in rows]
        part.prompts = {role: [prompts[i] for i in rows] for role, prompts in self.prompts.items()}
        part.rows = {role: seen.select(rows, trim=trim) for role, seen in self.rows.items()}
        return part

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Raises an error for a field that is not here, and tells where it is instead."""
            place = "is bootstrap[role] now" if name == "bootstrap_value" else "does not exist"
            if name in Experience.__dataclass_fields__:
                place = "stays with the controller: give it in prepare_batch"
            raise AttributeError(f"batch.{name} {place}", name=name, obj=self)


@dataclass(slots=True, kw_only=True)
class Experience(Batch):
    """Groups as tensors, including data that only the controller has: rewards, scores, records."""

    rewards: Tensor
    """``[B]``: the weighted sum over reward plugins, after ``transform_rewards``."""
    plugin_rewards: Tensor
    """``[B, K]``: raw rewards, in the order of ``reward_names``."""
    scores: Tensor
    """``[B]``: 0-1 scores, NaN without a score."""
    token_rewards: Tensor
    """``[B, T]``: the reward, on the last action token (or on the last one of each turn, if rewards are per turn)."""
    reward_names: tuple[str, ...] = ()
    """Alias of each plugin; ``ALIAS.PART`` for each part of its rewards."""
    reward_weights: tuple[float, ...] = ()
    """Weight of each of ``reward_names`` in ``rewards``."""
    shaped: Tensor | None = None
    """``[B, T]``: sum of ``shape_rewards`` (such as a KL); zeros without such hooks."""
    parent: Tensor | None = None
    """``[B]`` int64: the row that ``Trajectory.parent`` names; -1 if there is none, or if it left the batch."""
    branch: Tensor | None = None
    """``[B]`` int64: ``Trajectory.branch``."""
    trajectories: list[Trajectory] = field(default_factory=list, repr=False)
    """The rows as records."""

    def select(self, rows: Sequence[int], *, trim: bool = True) -> Experience:
        part = Batch.select(self, rows, trim=trim)
        part.trajectories = [self.trajectories[i] for i in rows] if self.trajectories else []
        if part.parent is not None:
            places = {row: place for place, row in enumerate(rows)}
            part.parent = part.parent.new_tensor([places.get(row, -1) for row in part.parent.tolist()])
        return part


@dataclass(slots=True)
class Distribution:
    """Log-probabilities of two models over the same tokens: ``k`` tokens, or the whole vocabulary; 0 at padding. If the other has
    its own tokens (``RoleNeed.own_tokens``), each is over its own vocabulary and rows, ``[B, T', V']`` and ``[B, T, V]``.
    """

    logprobs: Tensor
    """``[B, T, k]`` or ``[B, T, V]`` fp32: of the other role, without gradient."""
    own: Tensor
    """The same shape: of the model in the pass, with gradient."""
    ids: Tensor | None = None
    """``[B, T, k]`` int64: the tokens; None: the whole vocabulary, in order."""


RoleOutput: TypeAlias = Literal["logprobs", "values", "scores", "token_scores", "bootstrap", "entropy", "collision"]
"""Quantities that can be requested of a role over a batch."""
OF_ROWS = ("scores", "bootstrap")
"""Quantities of shape ``[B]``; the others are ``[B, T]``."""
AT_TOKENS = ("token_scores", *OF_ROWS)
"""Quantities that are read at a token itself, the last one too; the others are read where a token is predicted."""


@dataclass(slots=True)
class Outputs:
    """The results of a role's forward pass for the rows of a batch."""

    logprobs: Tensor | None = None
    """``[B, T]`` fp32, with gradient: log-softmax of ``logits / temperature`` at the completion tokens; 0 at padding."""
    entropy: Tensor | None = None
    """``[B, T]`` fp32: of the full vocabulary at the same temperature; a loss of it is an error unless a plugin needs
    ``Output("entropy")``."""
    collision: Tensor | None = None
    """``[B, T]`` fp32: ``Σ p²`` over the same distribution, of a role."""
    values: Tensor | None = None
    """``[B, T]`` fp32: scalar head at the position that predicts token t."""
    scores: Tensor | None = None
    """``[B]`` fp32: scalar head where transformers' sequence classification reads it: at the last token that is not the padding
    token of the model's configuration, so before an end token that pads too."""
    logits: Tensor | None = None
    """``[B, T, V]``: only if a plugin needs ``Output("logits")``."""
    others: dict[str, Distribution] = field(default_factory=dict)
    """role → its distribution and this model's, if a plugin needs ``Output("distribution", role=...)``."""
    bootstrap: Tensor | None = None
    """``[B]`` fp32: scalar head at the last token, whatever it is."""
    token_scores: Tensor | None = None
    """``[B, T]`` fp32: scalar head at token t itself, which ``values`` has one place later; 0 at padding."""
    router_loss: Tensor | None = None
    """Scalar: the loss that keeps a model's experts evenly used, over the rows' tokens, if the role has
    ``router_aux_loss_coef``.
    """

    def __post_init__(self) -> None:
        self.others = OfRoles("outputs.others", "distribution", self.others)


class PolicyLogprobs(NamedTuple):
    """Log-probabilities of the same tokens by the policy at three times, ``[B, T]`` float32 without gradient."""

    current: Tensor
    """Those of this forward pass."""
    old: Tensor
    """Those of the trainer's weights at the start of the step, log π_old; those of this pass with one update per batch, and with
    ``train.old_logprobs sampler``, where only weights that are 0 act.
    """
    sampler: Tensor
    """Those of the engine that sampled the tokens, log μ; NaN outside ``batch.sampled_mask``."""


@dataclass(slots=True)
class Metric:
    """A metric of the step. ``values`` may have any shape; ``mask`` (same shape) selects the elements that count.

    ``mean``, ``sum``, ``min`` and ``max`` are over all counted elements of the whole optimizer batch. ``ess`` is the effective
    sample size of weights as a fraction, ``(Σw)²/(N·Σw²)``: 1 if all are equal, 0 if all are 0. ``calibration`` is the expected
    calibration error of predictions with two outcomes (arXiv:1706.04599, eq. 3). ``values`` are the probabilities of what
    turned out to be true. Ten bins share the confidences ``max(p, 1 − p)`` from 0.5 to 1.
    """

    name: str
    values: Tensor | float
    mask: Tensor | None = None
    reduce: Literal["mean", "sum", "min", "max", "ess", "calibration"] = "mean"


@dataclass(slots=True)
class LossTerm:
    """An unreduced loss; the host reduces it over the whole optimizer batch.

    ``values`` is ``[B, T]``, or ``[B]`` (a row counts if its mask has any element). ``mask`` is known before the first forward
    pass. A mask that depends on ``outputs`` must become zeros in ``values``, which stay in the denominator.

    Raises ``TypeError`` for values that are no tensor, and a mask or aggregation that is a string.
    """

    name: str
    values: Tensor
    mask: Mask = LOSS
    coefficient: float = 1.0
    aggregation: Aggregation = TOKEN_MEAN
    corrected: bool = False
    """True for policy terms: the host multiplies them by ``importance_weights``. Terms ``[B]`` take only weights ``[B]``."""

    def __post_init__(self) -> None:
        if not hasattr(self.values, "requires_grad"):
            raise TypeError(f"the values of {self.name!r} are a {type(self.values).__name__}, not a tensor")
        if not isinstance(self.mask, Mask):
            raise TypeError(f"the mask of {self.name!r} is a Mask: LOSS, ACTION, COMPLETION or Extra(name), not {self.mask!r}")
        if not isinstance(self.aggregation, Aggregation):
            raise TypeError(
                f"the aggregation of {self.name!r} is an Aggregation, such as TOKEN_MEAN, not {self.aggregation!r}:"
                " Aggregation.parse reads texts"
            )


@dataclass(slots=True)
class Advantages:
    """``advantages`` and optional ``returns``, ``[B, T]`` float32."""

    advantages: Tensor
    returns: Tensor | None = None
    metrics: list[Metric] = field(default_factory=list)


LossItems: TypeAlias = Iterable["LossTerm | Metric"] | Iterator["LossTerm | Metric"]
