"""Choice of a run's model: the final one, that of a checkpoint or of any kept step, or another role's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf_host.config.run_dir import BEST, CONFIG, LAST, about_run, checkpoint_dirs, named_run, near_runs
from rlhf_host.config.yaml_file import plain, read_yaml
from rlhf_host.errors import PluginError, UserError, near_matches
from rlhf_host.once import once
from rlhf_host.plugins.selection import find
from rlhf_host.runs.step_models import saved_steps, written_model

ACTOR = "actor"
LINKS = {Path(link).name: link for link in (BEST, LAST)}
SHOWN = 8
"""Maximum number of steps that a message lists."""
LONGEST = 18
"""Digits of a step."""


@dataclass(frozen=True, slots=True)
class RunModel:
    """The directory of a model, or of an adapter, and where it comes from."""

    path: Path
    run: Path | None = None
    """Its run directory; None: it does not belong to a run."""
    step: int | None = None
    """Step after which it was written."""
    notice: str | None = None
    """Note for users who may have expected another model."""


def run_model(path: Path, checkpoint: str | None = None, role: str = ACTOR) -> RunModel:
    """Returns the model that ``path`` means.

    Args:
        path: a run directory or its name in ``runs/``, a checkpoint, or the directory of a model; ``RUN@STEP`` is a run's after
            this step. A finished run's is the final model, any other run's that of the newest checkpoint. Loading checks that a
            checkpoint's model is as it was written.
        checkpoint: checkpoint in a run directory: ``best``, ``last`` or a step. A step without a checkpoint is written, into a
            directory that goes with this process, by a package that has it (``protocols.StepModels``).
        role: role of the model; roles other than the actor are only in checkpoints.

    Raises:
        UserError: there is no such model.
    """
    run, step = at_step(path)
    asked = f"--checkpoint {checkpoint}"
    if step is not None:
        if checkpoint is not None:
            raise UserError(f"--checkpoint {checkpoint}: {path} names a step already: leave one of them out")
        asked, path, checkpoint = str(path), run, step
    path = named_run(path)
    if not path.is_dir():
        if path.exists():
            raise UserError(f"{path} is a file: give a model directory, a checkpoint or a run directory")
        beside = path.parent.iterdir() if path.parent.is_dir() else ()
        known = [*near_runs(path), *(str(path.parent / each.name) for each in beside if each.is_dir())]
        raise UserError(f"{path}: no such directory{near_matches(str(path), dict.fromkeys(known))}")
    if (path / CONFIG).is_file() or (path / "checkpoints").is_dir():
        return _of_run(path, checkpoint, role, asked)
    if checkpoint is not None:
        raise UserError(f"--checkpoint {checkpoint}: {path} is no run directory, so it has no checkpoints to choose from")
    if (path / "state.json").is_file():
        return _of_checkpoint(path, role)
    if role != ACTOR:
        raise UserError(f"--role {role}: {path} is one model: give the run directory or a checkpoint")
    for model in (path, path / "model"):
        if _is_model(model):
            return RunModel(model, run_of(path), _step(path))
    if any(path.glob("*.gguf")):
        return RunModel(path)  # loading says to name the file
    raise UserError(f"{path} contains no model: give a model directory, a checkpoint or a run directory")


def at_step(path: Path) -> tuple[Path, str | None]:
    """Returns the run directory and the step (or ``best``, or ``last``) of ``RUN@STEP``; any other path as it is, with None."""
    run, at, step = str(path).rpartition("@")
    if not at or not run or not step or "/" in step or named_run(path).exists():
        return path, None
    directory = named_run(Path(run))
    return (directory, step) if (directory / CONFIG).is_file() else (path, None)


@once
def step_model(name: str | None) -> str | None:
    """Returns the directory of the model that ``RUN@STEP`` means, as ``run_model`` does; any other name as it is."""
    if not name or at_step(Path(name))[1] is None:
        return name
    return str(run_model(Path(name)).path)


def model_steps(run: Path) -> list[int]:
    """Returns the steps of a run whose models ``RUN@STEP`` can mean, in order."""
    run = named_run(run)
    final = _step(run / "model") if _is_model(run / "model") else None
    return sorted({*dict(checkpoint_dirs(run)), *saved_steps(run), *([] if final is None else [final])})


def run_of(path: Path) -> Path | None:
    """Returns the run directory that ``path`` is, or is inside, in the form in which it is given."""
    path = named_run(at_step(path)[0])
    # RUN/checkpoints/step-000001/roles/critic is the deepest.
    above = [parent for parent in path.parents[:4] if parent != Path()]
    return next((parent for parent in (path, *above, *path.absolute().parents[:4]) if (parent / CONFIG).is_file()), None)


def _of_run(run: Path, checkpoint: str | None, role: str, asked: str) -> RunModel:
    """``asked``: what was written for ``checkpoint``, for messages."""
    if checkpoint is not None:
        step = _number(checkpoint)
        if role == ACTOR and step is not None and step not in dict(checkpoint_dirs(run)):
            return _of_step(run, step)
        return _of_checkpoint(_checkpoint(run, checkpoint, asked), role)
    about, checkpoints = about_run(run), checkpoint_dirs(run)
    finished = about.get("status", "finished") == "finished"
    if role == ACTOR and _is_model(run / "model") and (finished or not checkpoints):
        return RunModel(run / "model", run_of(run), _step(run / "model"))
    if not checkpoints:
        raise UserError(f"{run} has no model yet: it has neither model/ nor a checkpoint (--checkpoint.every)")
    step, path = checkpoints[-1]
    why = "the run wrote no final model" if finished else "the run has not finished"
    notice = f"{why}: this is its newest checkpoint, of step {step}" if role == ACTOR else None
    if notice and not step:
        notice += ", the model before training"
    return _of_checkpoint(path, role, notice)


def _of_step(run: Path, step: int) -> RunModel:
    """Returns the model after a step that has no checkpoint."""
    if _is_model(run / "model") and _step(run / "model") == step:
        return RunModel(run / "model", run_of(run), step)
    model = written_model(run, step)
    if model is None:
        there = model_steps(run)
        raise UserError(f"{run} has no checkpoint of step {step}{_near_steps(there, step)}{_ends(there)}{_missing(run)}")
    return RunModel(model, run_of(run), step)


def _missing(run: Path) -> str:
    """Returns what to install where the run's weight sync, which may have kept more steps, is not installed."""
    try:
        settings = plain(read_yaml(run / CONFIG))
        sync = settings.get("sync") if isinstance(settings, dict) else None
    except (OSError, UserError):
        return ""
    name = sync.get("name") if isinstance(sync, dict) else None
    try:
        if isinstance(name, str):
            find("weight_sync", name)
    except PluginError as error:
        return f". More may be kept by its weight sync: {error}"
    return ""


def _number(name: str) -> int | None:
    """Returns the step that ``17`` or ``step-000017`` means; None: it is no step that any run has."""
    number = name.removeprefix("step-")
    return int(number) if number.isascii() and number.isdecimal() and len(number) <= LONGEST else None


def _checkpoint(run: Path, name: str, asked: str) -> Path:
    """Returns the directory of the checkpoint with this name or step."""
    checkpoints = dict(checkpoint_dirs(run))
    if name in LINKS:
        if (run / LINKS[name]).is_dir():
            return run / "checkpoints" / (run / LINKS[name]).resolve().name
        if name == Path(LAST).name and checkpoints:  # the file system has no links
            return checkpoints[max(checkpoints)]
        raise UserError(f"{asked}: {run} has no {LINKS[name]}" + _near_steps(checkpoints, 0))
    number = _number(name)
    if number is None:
        raise UserError(f"{asked}: should be best, last or a step{near_matches(name, LINKS)}")
    if number not in checkpoints:
        raise UserError(f"{asked}: {run} has no checkpoint of step {number}{_near_steps(checkpoints, number)}")
    return checkpoints[number]


def _ends(steps: Sequence[int]) -> str:
    """Returns the first and the last of many steps."""
    return f" ({len(steps)} in all, from {steps[0]} to {steps[-1]})" if len(steps) > SHOWN else ""


def _near_steps(steps: Iterable[int], wanted: int) -> str:
    """Returns the existing steps; if there are many, those near the requested one."""
    near = sorted(sorted(steps, key=lambda step: abs(step - wanted))[:SHOWN])
    return f"; it has those of {'step' if len(near) == 1 else 'steps'} {', '.join(map(str, near))}" if near else ""


def _of_checkpoint(checkpoint: Path, role: str, notice: str | None = None) -> RunModel:
    models = {ACTOR: checkpoint / "model"} | {path.name: path for path in sorted(checkpoint.glob("roles/*"))}
    if role not in models:
        raise UserError(
            f"--role {role}: {checkpoint} has no such model; it has {', '.join(models)}{near_matches(role, models)}"
        )
    if not _is_model(models[role]):
        raise UserError(f"{checkpoint} is damaged: {models[role]} contains no model; take another checkpoint of the run")
    return RunModel(models[role], run_of(checkpoint), _step(checkpoint), notice)


def _step(path: Path) -> int | None:
    """Returns the step of the checkpoint that ``path`` is, or is inside; for a finished run's final model, the run's."""
    for parent in (path.absolute(), *path.absolute().parents[:2]):
        name = parent.resolve().name  # best and last are links
        if (parent / "state.json").is_file() and (step := name.removeprefix("step-")).isdecimal():
            return int(step)
    about = about_run(path.absolute().parent)
    last = about.get("step") if path.name == "model" and about.get("status") == "finished" else None
    return last if isinstance(last, int) else None


def _is_model(path: Path) -> bool:
    return (path / "config.json").is_file() or (path / "adapter_config.json").is_file()
