"""Batches of rows as tensors, and the losses and metrics that come of them. torch is imported with the first tensor, not here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from rlhf_host.records.episodes import Trajectory

if TYPE_CHECKING:
    from torch import Tensor

Aggregation: TypeAlias = str
"""``token-mean``, ``sequence-mean-token-mean``, ``sequence-mean-token-sum``,
``sequence-mean-token-sum-over(L)`` or ``group-mean-token-mean``."""


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
