"""The batch of an X-ray: the judged answers of one saved step, the model that meets them, and their old log-probabilities."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlhf_host import Trajectory, UserError
from rlhf_host.runs import RunDirectory, at_step, model_steps, read_steps, run_model, run_of
from rlhf_host.sampling import SavedStep

Old = Literal["model", "file"]
LOADED = ("tokenizer", "dtype", "quantize", "attn_implementation", "trust_remote_code")
"""Settings of a run's actor with which its model is loaded, at each step."""
FIRST = ("revision", "adapter", *LOADED)
"""Settings with which the model that the run began with is loaded."""


@dataclass(slots=True)
class Met:
    """The model that meets the batch."""

    model: str
    loaded: dict[str, Any] = field(default_factory=dict)
    """Settings of the run's actor with which it is loaded."""
    old: Old = "model"
    """Origin of old log-probabilities, if nobody says."""
    notices: list[str] = field(default_factory=list)


@dataclass(slots=True)
class SavedBatch:
    """The batch of which an X-ray is made."""

    rows: list[Trajectory]
    weights: dict[str, float]
    """Reward → weight."""
    sampling: dict[str, int | float]
    step: int
    where: str
    model: str
    old_logprobs: Old
    notices: list[str]
    sampled_by: dict[str, Any]
    """Settings of the run that sampled it, as far as algorithms ask for them."""
    loaded: dict[str, Any] = field(default_factory=dict)
    """Settings of the run's actor with which its model is loaded."""

    @classmethod
    def of(
        cls, saved: str | Path | Sequence[Trajectory], model: str | Path | None, step: int | None, old_logprobs: str | None
    ) -> SavedBatch:
        """Raises ``UserError`` for what cannot be X-rayed."""
        if old_logprobs not in (None, "model", "file"):
            raise UserError(f"--old-logprobs {old_logprobs}: it is model or file")
        if not isinstance(saved, str | Path):
            chosen = SavedStep(1, "train", list(saved), {}, where="the trajectories")
            run = None
        else:
            run, named = at_step(Path(saved))
            if named is not None and step is not None:
                raise UserError(f"{saved} names a step already: leave --step out")
            chosen = _step(run, _number(named, str(saved)) if named is not None else step, str(saved))
        judged = [dataclasses.replace(row, advantage=None, advantages=None) for row in chosen.rows if row.reward is not None]
        if not judged:
            raise UserError(
                f"{chosen.where}: no answer of step {chosen.step} has a reward: score them with rlhf replay {saved} --reward NAME "
                "--output SCORED.jsonl"
            )
        met = _model(run if isinstance(saved, str | Path) else None, chosen.step, model, judged)
        notices = met.notices
        if len(judged) < len(chosen.rows):
            notices.append(f"{len(chosen.rows) - len(judged)} answers without a reward are left out")
        old: Old = old_logprobs or met.old  # type: ignore[assignment]
        unknown = sum(segment.logprobs is None for row in judged for segment in row.actions)
        if old == "file" and unknown:
            raise UserError(f"{chosen.where}: {unknown} turns have no log-probabilities: give --old-logprobs model")
        weights = {name: chosen.weights.get(name, 1.0) for row in judged for name in row.rewards}
        directory = run_of(Path(saved)) if isinstance(saved, str | Path) else None
        settings = {} if directory is None else RunDirectory(directory).settings
        sampled_by: dict[str, Any] = {name: settings[name] for name in ("agent", "rollout", "reward") if name in settings}
        sampling = dict(chosen.sampling)
        return cls(judged, weights, sampling, chosen.step, chosen.where, met.model, old, notices, sampled_by, met.loaded)


def _number(step: str, asked: str) -> int:
    text = step.removeprefix("step-")
    if not text.isdecimal():
        raise UserError(f"{asked}: name the step of a batch by its number, as in RUN@40")
    return int(text)


def _step(path: Path, wanted: int | None, asked: str) -> SavedStep:
    """Returns the step of a file or a run. Raises ``UserError`` for one that is not there, or has no tokens."""
    steps = {step.step: step for step in read_steps(path) if step.split == "train"}
    if not steps:
        raise UserError(f"{path} has no trajectories of the split 'train'")
    listed = ", ".join(map(str, steps)) if len(steps) <= 8 else f"{min(steps)} to {max(steps)}, {len(steps)} in all"
    if wanted is None and len(steps) > 1:
        raise UserError(f"{asked} has the steps {listed}: an X-ray is of one: give --step N")
    if wanted is not None and wanted not in steps:
        raise UserError(f"{asked}: no trajectories of step {wanted} are saved; there are those of {listed}")
    return steps[next(iter(steps)) if wanted is None else wanted]


def _model(run: Path | None, step: int, model: str | Path | None, rows: Sequence[Trajectory]) -> Met:
    """Returns the model that meets the batch. Of a run it is the one that sampled the batch, if that is there, else the one before
    the step, else the one after it. Raises ``UserError`` where none is known."""
    if model is not None:
        return Met(str(model))
    directory = None if run is None else run_of(run)
    if directory is None:
        raise UserError("no model is given: --model DIR")
    there = model_steps(directory)
    versions = {version for row in rows for segment in row.actions for version in segment.versions or ()}
    if RunDirectory(directory).settings.get("from_trajectories"):
        versions = set()  # those of another run
    why = None
    if len(versions) > 1:
        why = f"the answers were sampled by weights of several steps, {min(versions)} to {max(versions)}"
    elif versions and (sampler := max(versions)) != step - 1:
        if sampler < step and (sampler == 0 or sampler in there):
            return _of_step(directory, sampler)
        why = f"the answers were sampled by the weights after step {sampler}, of which the run kept no model"
    if step == 1 or step - 1 in there:
        met = _of_step(directory, step - 1)
        if why is not None:
            met.old = "file"
            met.notices.append(
                f"{why}: the model is that after step {step - 1}, and unless --old-logprobs is given, ratios are to the"
                " log-probabilities of the file"
            )
        return met
    if step not in there:
        kept = ", ".join(map(str, there[-8:])) or "none"
        raise UserError(
            f"{directory} kept no model of step {step - 1} or {step} (it has {kept}): X-ray a step beside one, or give"
            " --model DIR; --checkpoint.every keeps more"
        )
    met = _of_step(directory, step)
    met.old = "file"
    met.notices.append(
        f"the model is that after step {step}, which has learnt from the batch: the run kept none of step {step - 1}"
    )
    if why is not None:
        met.notices.append(why)
    return met


def _of_step(directory: Path, step: int) -> Met:
    """Returns the run's model after a step, loaded as the run loaded it; of step 0 the one that it began with."""
    actor: dict[str, Any] = RunDirectory(directory).settings.get("roles", {}).get("actor", {})
    names = LOADED if step else FIRST
    loaded = {name: actor[name] for name in names if actor.get(name) not in (None, False, "auto")}
    if step:
        return Met(str(run_model(directory, str(step)).path), loaded)
    if actor.get("model") is None:
        raise UserError(f"{directory} does not say which model it began with: give --model DIR")
    return Met(str(actor["model"]), loaded)
