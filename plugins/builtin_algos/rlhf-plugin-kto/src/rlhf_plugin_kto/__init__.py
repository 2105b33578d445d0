"""KTO: completions marked desirable or undesirable, each alone (arXiv:2402.01306)."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from rlhf_rows import losses

from rlhf_host import Batch, Experience, Forbid, Group, LossTerm, Metric, Needs, Outputs, RoleNeed, Trajectory, hookimpl
from rlhf_host import functional as F

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid")

    loss: Literal["kto", "apo_zero_unpaired"] = Field(
        "kto", description="kto compares with the estimated KL; apo_zero_unpaired compares with 0 and saves its passes"
    )
    beta: float = Field(0.1, gt=0, description="scale of the implicit rewards")
    desirable_weight: float = Field(1.0, ge=0, description="weight of desirable completions")
    undesirable_weight: float = Field(1.0, ge=0, description="weight of undesirable completions")

    @model_validator(mode="after")
    def _some_weight(self) -> Options:
        if self.desirable_weight == self.undesirable_weight == 0:
            raise ValueError("desirable_weight and undesirable_weight are both 0, and no row would be trained")
        return self


class KTO:
    """KTO: desirable completions must get likelier and undesirable ones less likely, compared with the estimated KL."""

    Options = Options
    _warned = False

    def __init__(self, options: Options):
        self.options = options

    @hookimpl
    def needs(self) -> Needs:
        roles, outputs = losses.REFERENCE
        alone = Forbid("train.batch_size", 1, "the KL is estimated from another row's completion: set 2 or more")
        return Needs(
            data="unpaired",
            roles=(RoleNeed("actor", trainable=True, source=None, lr=1e-6), *roles),
            outputs=outputs,
            rewards=False,
            forbids=(alone,) if self.options.loss == "kto" else (),
        )

    @hookimpl
    def make_rows(self, groups: Sequence[Group]) -> list[Trajectory]:
        """Returns the rows, and each prompt with the completion of a row that has another prompt, which is not trained: of the row
        before it (the first with the last's), or further back where that makes more prompts differ. A row whose prompt does not
        differ even so has none.
        """
        rows = [row for group in groups for row in group.trajectories]
        if self.options.loss != "kto":
            return rows
        prompts = [(tuple(row.prompt_ids), *(image.key for image in row.segments[0].images)) for row in rows]
        back = shift(prompts)
        others = [mismatched(row, rows[at - back]) for at, row in enumerate(rows) if prompts[at] != prompts[at - back]]
        if len(rows) > 1 and not others and not self._warned:
            self._warned = True
            log.warning("kto: all rows of a batch have one prompt, so the KL counts as 0: set a larger train.batch_size")
        return [*(replace(row, columns={**row.columns, "mismatched": 0.0}) for row in rows), *others]

    @hookimpl
    def loss_masks(self, experience: Experience) -> Tensor:
        return experience.action_mask & ~is_mismatched(experience).unsqueeze(-1)

    @hookimpl
    def batch_statistics(self, outputs: Outputs, batch: Batch) -> Iterator[Metric]:
        if self.options.loss == "kto":
            yield Metric("mismatched_kl", log_ratios(outputs, batch), is_mismatched(batch))

    @hookimpl
    def compute_loss(self, outputs: Outputs, batch: Batch) -> Iterator[LossTerm | Metric]:
        """Computes ``w·(1 − σ(±β(x − z)))``, ``x = Σ_t (log π − log ref)``, ``z = max(0, mean of x over mismatched rows)``
        without gradient (arXiv:2402.01306, eqs. 7 and 8; ``apo_zero_unpaired``: ``z = 0``, arXiv:2408.06266, eq. 7).
        """
        options, label = self.options, batch.columns["label"]
        if options.loss == "kto" and "mismatched" not in batch.columns:
            raise ValueError("the batch has no column 'mismatched': kto trains on the rows of its make_rows")
        # An optimizer batch of one prompt, as the last of an epoch may be, has no other completion.
        z = max(0.0, batch.stats.get("mismatched_kl", 0.0)) if options.loss == "kto" else 0.0
        x, good, trained = log_ratios(outputs, batch), label == 1, batch.loss_mask.any(-1)
        sign, weight = 2.0 * good - 1, good * options.desirable_weight + ~good * options.undesirable_weight
        yield LossTerm("kto", weight * (-options.beta * sign * (x - z)).sigmoid())
        if options.loss == "kto":
            yield Metric("kl", z)
        rewards = options.beta * x.detach()
        yield Metric("rewards/chosen", rewards, trained & good)
        yield Metric("rewards/rejected", rewards, trained & ~good)
        yield Metric("desirable", good.float(), trained)


def shift(prompts: Sequence[Hashable]) -> int:
    """Returns the smallest number of places by which as many prompts as possible meet another one, 0 for one prompt."""
    import numpy as np

    numbers: dict[Hashable, int] = {}
    ids = np.array([numbers.setdefault(prompt, len(numbers)) for prompt in prompts])
    most = best = 0
    for back in range(1, len(ids)):
        if (count := int((ids != np.roll(ids, back)).sum())) > most:
            most, best = count, back
        if most == len(ids):
            break
    return best


def mismatched(row: Trajectory, other: Trajectory) -> Trajectory:
    """Returns ``row``'s prompt with ``other``'s completion."""
    segments = [row.segments[0], *other.completion]
    columns = {**row.columns, "mismatched": 1.0}
    return replace(row, episode_id=f"{row.episode_id}-mismatched", segments=segments, columns=columns, row=0)


def is_mismatched(batch: Batch) -> Tensor:
    """Returns ``[B]`` bool; all False if there is no such column."""
    return batch.columns.get("mismatched", batch.group_id * 0) == 1


def log_ratios(outputs: Outputs, batch: Batch) -> Tensor:
    """Returns ``[B]``: ``Σ_t (log π − log ref)`` over the completion's own tokens."""
    assert outputs.logprobs is not None
    return F.masked_sum(outputs.logprobs - batch.logprobs["reference"], batch.action_mask, -1)
