"""Batches of rows that nothing sampled or scored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from rlhf_host import Experience, Group, Needs, RoleHandle
from rlhf_host.internals import (
    PluginManager,
    add_extra,
    add_outputs,
    add_prompts,
    apply_masks,
    made_rows,
    make_experience,
    timed,
)
from rlhf_host.protocols import Trainer


@dataclass(slots=True)
class Batches:
    """Turns groups of rows into batches, for training and evaluation; their log-probabilities are those at temperature 1."""

    manager: PluginManager
    needs: Needs
    roles: Mapping[str, RoleHandle] = field(default_factory=dict)

    def batch(
        self,
        groups: Sequence[Group],
        trainer: Trainer,
        *,
        step: int,
        version: int = 0,
        times: dict[str, float],
        known: Callable[[Experience], Mapping[str, Tensor]],
    ) -> Experience:
        """Returns the groups as tensors, with the log-probabilities of other roles and prepared values of plugins.

        Args:
            version: of the actor's weights.
            times: gets the seconds of each phase.
            known: returns role → its log-probabilities, of roles that are not loaded.
        """
        with timed(times, "rows"):
            experience = self.rows(groups, step=step, version=version)
        with timed(times, "logprobs"):
            experience.logprobs = dict(known(experience))
            add_prompts(experience, self.manager, self.needs, self.roles)
            add_outputs(experience, trainer, self.needs, "fused")
            add_extra(experience, self.manager, trainer, self.needs)
        return experience

    def rows(self, groups: Sequence[Group], *, step: int = 0, version: int = 0) -> Experience:
        """Returns the groups, or the rows that a plugin makes from them, as tensors."""
        if self.manager.has("make_rows"):
            groups = made_rows(groups, self.manager)
        experience = make_experience(groups, {}, step=step, max_new_tokens=0, temperature=1.0, version=version)
        apply_masks(experience, self.manager)
        return experience
