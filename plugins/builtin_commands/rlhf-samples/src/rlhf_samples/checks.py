"""Refusals of what cannot be sampled or replayed, before any model is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_host import UserError
from rlhf_host.sampling import scoring_refusals
from rlhf_host.settings import RunConfig

if TYPE_CHECKING:
    from rlhf_host.internals import PluginManager


def check_rollout(config: RunConfig, manager: PluginManager) -> None:
    """Refuses rollouts that cannot be made. Raises ``UserError``, one line per reason."""
    lines = [*scoring_refusals(config, manager)]
    if not config.roles["actor"].model:
        lines.append("no model to sample from: give --actor.model PATH")
    if not config.data.sources:
        lines.append("no data: give --data PATH")
    if lines:
        raise UserError("\n".join(lines))


def check_replay(config: RunConfig, manager: PluginManager) -> None:
    """Refuses replays that would change nothing. Raises ``UserError``, one line per reason."""
    lines = [*scoring_refusals(config, manager)]
    if not (config.reward or config.algo or config.extensions):
        lines.append("nothing is chosen to replay with: give --reward NAME, --algo NAME or --with NAME")
    if lines:
        raise UserError("\n".join(lines))


def prompts_per_step(config: RunConfig, steps: int | None, rollouts: int | None) -> list[int]:
    """Returns the number of groups of each step: ``steps`` whole batches, or batches until there are ``rollouts`` trajectories.

    Raises:
        UserError: when both are given.
    """
    size = config.train.batch_size
    if rollouts is None:
        return [size] * (1 if steps is None else steps)
    if steps is not None:
        raise UserError("--steps and --rollouts both say how much to sample: give one")
    wanted = -(-rollouts // config.rollout.n)
    return [size] * (wanted // size) + ([wanted % size] if wanted % size else [])
