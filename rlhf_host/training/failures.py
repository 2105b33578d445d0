"""Messages of a run that fails: why it ended, and how to go on."""

from __future__ import annotations

from pathlib import Path

from rlhf_host.command import rlhf
from rlhf_host.config.run_dir import checkpoint_dirs
from rlhf_host.errors import LostError, RunError, UserError, place_of
from rlhf_host.plugins.manager import HookFailed
from rlhf_host.training.checkpoints import Checkpoint


def is_lost(error: BaseException | None) -> bool:
    """Returns True if the run ended because a process or machine is gone."""
    while error is not None and not isinstance(error, LostError):
        error = error.__cause__
    return error is not None


def explained(error: BaseException, run_dir: Path, step: int, begun: Checkpoint | None) -> BaseException:
    """Returns the error with the next step for the user in its message. An unexpected error is returned unchanged.

    Args:
        step: the last finished one.
        begun: the checkpoint that the run was resumed from.
    """
    if isinstance(error, KeyboardInterrupt):
        return KeyboardInterrupt(f"Interrupted after step {step}; {_way_on(run_dir, None)}.")
    foreseen = isinstance(error, RunError) and step > 0
    foreseen = foreseen or is_lost(error) or (isinstance(error, RunError | UserError) and bool(checkpoint_dirs(run_dir)))
    if not foreseen:
        return RunError(message_of(error)) if isinstance(error, HookFailed) else error
    blamed = None if isinstance(error, UserError) else begun  # that one says itself what to do
    message = f"{message_of(error).rstrip('.')}; {_way_on(run_dir, blamed)}"
    return (UserError if isinstance(error, UserError) else RunError)(message)


def message_of(error: BaseException) -> str:
    """Returns an error's text, with the line of a plugin's code that it came from."""
    cause = error.__cause__ if isinstance(error, HookFailed) else None
    return (str(error) or type(error).__name__) + ("" if cause is None else place_of(cause))


def _way_on(run_dir: Path, begun: Checkpoint | None) -> str:
    """Returns where the run can go on from, and the command for it."""
    saved = checkpoint_dirs(run_dir)
    if not saved:
        return f"no checkpoint was written yet (--checkpoint.every), so {rlhf('train', '--resume', run_dir)} begins again"
    way = f"continue from {saved[-1][1]} with {rlhf('train', '--resume', run_dir)}"
    if begun is not None and begun.path == saved[-1][1] and len(saved) > 1:
        way += f"; if that fails again, remove {begun.path} to continue from {saved[-2][1]}"
    return way
