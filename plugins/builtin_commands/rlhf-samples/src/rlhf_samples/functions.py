"""Commands as Python functions: ``rollout`` and ``replay``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_host import Trajectory, UserError
from rlhf_host.runs import read_steps
from rlhf_host.sampling import Arguments, SavedStep, TrajectoryFile, configured, speaking
from rlhf_samples.changes import Replay, replay_steps
from rlhf_samples.checks import check_replay, check_rollout, prompts_per_step
from rlhf_samples.sampled import sample_steps

if TYPE_CHECKING:
    from rlhf_host.sampling import Collected


@speaking()
def rollout(
    *,
    model: str | Path | None = None,
    data: Any = None,
    rewards: Any = None,
    extensions: Any = None,
    agent: Any = None,
    steps: int | None = None,
    rollouts: int | None = None,
    output: str | Path | None = None,
    config: str | Path | Sequence[str | Path] | None = None,
    **settings: Any,
) -> list[Trajectory]:
    """Samples and scores as the first steps of ``rlhf_host.train`` would, without training, as ``rlhf rollout`` does.

    Args:
        model: the model to sample from.
        data: tasks to answer, as for ``rlhf_host.train``.
        rewards: reward plugins or functions; without any, trajectories are unjudged, and ``replay`` can judge them.
        extensions: filters of groups.
        agent: plays the episodes.
        steps: batches of ``train.batch_size`` prompts; default: 1.
        rollouts: instead of ``steps``: number of trajectories, rounded up to whole prompts.
        output: a ``.jsonl`` file for them.
        config: what ``--config`` takes, or a list of that.
        **settings: all other settings.

    Raises:
        UserError: settings or input cannot be used.
        RunError: too many trajectories could not be judged.
    """
    named = {"model": model, "data": data, "rewards": rewards, "extensions": extensions, "agent": agent}
    asked = Arguments(named, settings)
    with configured(asked, "rollout", config) as (run, manager):
        check_rollout(run.config, manager)
        file = None if output is None else TrajectoryFile(Path(output))
        trajectories: list[Trajectory] = []

        def take_in(step: int, collected: Collected) -> None:
            rows = collected.trajectories_in_order()
            trajectories.extend(rows)
            if file is not None:
                file.add(SavedStep.of(run.config, step, "train", rows))

        sample_steps(run.config, manager, prompts_per_step(run.config, steps, rollouts), take_in, asked.rows)
        if file is not None:
            file.write()
        return trajectories


@speaking()
def replay(
    saved: str | Path | Sequence[Trajectory],
    *,
    algo: Any = None,
    rewards: Any = None,
    extensions: Any = None,
    model: str | Path | None = None,
    config: str | Path | Sequence[str | Path] | None = None,
    **settings: Any,
) -> Replay:
    """Scores saved trajectories and computes their advantages again, as ``rlhf replay`` does.

    Args:
        saved: a file of ``rlhf rollout``, a run directory or its ``trajectories/``, or what ``rollout`` returned. Texts without
            tokens are enough without ``algo`` and without plugins that ask models.
        algo: computes advantages.
        rewards: new rewards; default: rewards stay as saved.
        extensions: filters and changes of rewards.
        model: needed only if a plugin asks for a role.
        config: what ``--config`` takes, or a list of that.
        **settings: all other settings.

    Raises:
        UserError: settings or input cannot be used.
        RunError: a plugin returns something unusable.
    """
    asked = Arguments({"algo": algo, "rewards": rewards, "extensions": extensions, "model": model}, settings)
    with configured(asked, "replay", config) as (run, manager):
        check_replay(run.config, manager)
        if isinstance(saved, str | Path):
            steps = read_steps(Path(saved), texts=run.config.algo is None)
        elif saved:
            steps = [SavedStep(1, "train", list(saved), {}, where="the trajectories")]
        else:
            raise UserError("there are no trajectories to replay")
        return replay_steps(run.config, manager, steps)
