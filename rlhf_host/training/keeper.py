"""Checkpoints of a run: when one is due, what is in it, how it is written beside training, and which ones are kept."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlhf_host.config.run_dir import BEST, LAST
from rlhf_host.errors import DivergedError, LostError, RunError, near_matches
from rlhf_host.interrupts import end_thread
from rlhf_host.phases import phase
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.plugins.selection import PYTHON
from rlhf_host.rollouts.gate import Barrier
from rlhf_host.training.checkpoints import (
    Checkpoint,
    copy_checkpoint,
    keep_checkpoints,
    plain_state,
    point_to,
    remove_leftovers,
)
from rlhf_host.training.components import RunComponents
from rlhf_host.training.disk import WHILE_RUNNING
from rlhf_host.training.trained_roles import saved_roles
from rlhf_host.training.untrained_groups import read_untrained, write_untrained

log = logging.getLogger(__name__)

WAKE_S = 0.5
"""Seconds between two checks for signals by a thread that waits for a checkpoint."""
ABANDON_S = 2.0
"""Seconds to remove what was written when the run ends without it."""


@dataclass(slots=True)
class CheckpointKeeper:
    """Writes the checkpoints of one run. A failure ends the run, or is logged where ``checkpoint.on_error`` is ``warn``."""

    parts: RunComponents
    scoring: Barrier | None = None
    """Before rewards whose state changes beside the steps, where there are some."""
    waited_s: float = 0.0
    """Seconds for which training has waited for checkpoints, since somebody set it to 0."""
    _position: dict[str, Any] | None = None
    """Beside the weights, all that a checkpoint of the last step has; ``None`` while the weights are on their way to the next."""
    _saved: tuple[int, dict[str, float] | None] | None = None
    """Step and pending metrics of the checkpoint written last, or tried."""
    _saved_groups: frozenset[int] = frozenset()
    """Ordinals of the finished groups in it."""
    _saving: Saving | None = None
    """The checkpoint that is being written."""

    def begin(self) -> None:
        """Removes what a killed run left half-written, and notes where this one begins."""
        remove_leftovers(self.parts.run_dir)
        self.parts.ledger.go_back(self.parts.progress.step, self.note()["stream"])

    def restore(self, checkpoint: Checkpoint) -> None:
        """Goes on from it."""
        state, progress = checkpoint.state, self.parts.progress
        progress.load_state_dict(checkpoint.step, state)
        finished = read_untrained(checkpoint.path)
        self._saved, self._saved_groups = (checkpoint.step, progress.pending), frozenset(finished)
        self.parts.source.load_state_dict(state["stream"], finished)
        for role, rate in progress.rates.items():
            self.parts.runtime.trainer.adjust(role, lr=rate)
        self.parts.runtime.load_state(checkpoint.optimizers)
        torch.set_rng_state(checkpoint.tensors["torch_rng"])
        load_plugins(self.parts.manager, checkpoint.tensors["plugins"], state["plugins"])

    def note(self) -> dict[str, Any]:
        """Notes where the data is, the states of plugins and the random numbers: what comes next may fail halfway."""
        if self.scoring is not None:
            self.parts.events.run(_held(self.scoring, self.parts.config.rollout.stall_s), interruptible=False)
        pipeline = self.parts.source.pipeline
        plugins = {key: plain_state(state, key) for key, state in self.parts.manager.each("state_dict")}
        self._position = {
            "stream": self.parts.source.state_dict(),
            "finished": pipeline.finished() if pipeline is not None else {},
            "plugins": plugins,
            "torch_rng": torch.get_rng_state(),
        }
        if self.scoring is not None:
            self.parts.events.run(_release(self.scoring), interruptible=False)
        return self._position

    def forget(self) -> None:
        """Drops what was noted, because an update is about to move the weights."""
        self._position = None

    def compare(self, metrics: Mapping[str, float]) -> None:
        """Remembers the step with the best ``checkpoint.best``.

        Raises:
            RunError: no such metric exists.
        """
        checkpoint, name, progress = self.parts.config.checkpoint, self.parts.config.checkpoint.best, self.parts.progress
        if name is None:
            return
        if name not in metrics:
            due = any(key.startswith("eval/") for key in metrics) if name.startswith("eval/") else progress.step > 0
            if due and progress.best is None:
                near = near_matches(name, metrics)
                again = "resumed, the run needs --checkpoint.best NAME"
                raise RunError(f"checkpoint.best is {name}, and there is no such metric{near}; {again}")
            return
        value = metrics[name]
        sign = 1.0 if checkpoint.best_mode == "max" else -1.0
        if math.isfinite(value) and (progress.best is None or sign * value > sign * progress.best["value"]):
            progress.best = {"step": progress.step, "value": value}

    def after_step(self, *, last: bool) -> None:
        """Writes a checkpoint where one is due: ``checkpoint.every`` steps, and of a step that is the best so far."""
        if self._saving is not None and self._saving.done:
            self.settle()
        step, checkpoint = self.parts.progress.step, self.parts.config.checkpoint
        due = self.parts.progress.best_step == step or bool(checkpoint.every and step % checkpoint.every == 0)
        if due and not (last and checkpoint.final):  # the end of the run writes that one
            self.save()

    def end(self, *, interrupted: bool) -> None:
        """Writes the last checkpoint where it is wanted, and waits for it."""
        progress, needed = self.parts.progress, interrupted or self.parts.config.checkpoint.final
        if needed and not self._up_to_date(groups=interrupted):
            phase("Writing the last checkpoint")
            self.save(needed=True)
        self.settle(needed=needed)
        finished = self.parts.config.checkpoint.keep is None and not interrupted
        if finished or progress.begun is not None:  # nobody begins again with it
            keep_checkpoints(self.parts.run_dir, progress.step, 1 if finished else self._limit, (progress.best_step,))

    def rescue(self) -> None:
        """Writes a checkpoint of the last finished step of a run that fails, unless there is one or the weights have moved."""
        progress = self.parts.progress
        if progress.step and self._position is not None and not self._up_to_date(groups=True):
            try:
                self.save()
            except Exception as error:
                log.warning("step %d is not saved: %s", progress.step, error)
        self.close()

    def close(self) -> None:
        """Waits for the checkpoint that is being written; a failure is logged."""
        if (saving := self._saving) is not None:
            try:
                self.settle(needed=True)
            except Exception as error:
                log.warning("step %d is not saved: %s", saving.step, error)

    def abandon(self) -> None:
        """Ends the writing of a checkpoint; what there is of it is removed."""
        if self._saving is not None:
            self._saving.abandon()

    def save(self, *, needed: bool = False) -> None:
        """Copies a checkpoint and begins to write it, once the one before is written.

        Args:
            needed: a failure ends the run whatever ``checkpoint.on_error`` says.

        Raises:
            RunError: this one or the one before cannot be written, or the weights diverged.
        """
        assert self._position is not None
        started, progress = time.perf_counter(), self.parts.progress
        self.settle()
        self._saved = (progress.step, progress.pending)
        self._add_finished(self._position)
        self._saved_groups = frozenset(self._position["finished"])
        if "ordinal" in self._position["stream"]:
            self.parts.ledger.check(self._position["stream"])
        tensors = {name: self._position[name] for name in ("plugins", "torch_rng")}
        state = progress.state_dict() | {"stream": self._position["stream"], "plugins": plugin_sources(self.parts.manager)}
        state["config"] = self.parts.config.model_dump(mode="json")
        savers = {need.name: partial(self.parts.runtime.save_role, need.name) for need in saved_roles(self.parts.needs)}
        pending = partial(write_untrained, self._position["finished"])
        fields = {name: self._fields(name) for name in savers}
        try:
            self.parts.ledger.flush()
            write = copy_checkpoint(
                self.parts.run_dir, progress.step, state, tensors, savers, self.parts.runtime.save_state, pending, fields
            )
        except RunError as error:
            self._fail(error, needed)
        else:
            self._saving = Saving(progress.step, self._work(write), here=self.parts.config.debug)
        self.waited_s += time.perf_counter() - started

    def _fields(self, role: str) -> dict[str, Any]:
        """Returns what plugins add to the role's ``config.json``. Raises ``RunError`` for what is no JSON."""
        fields: dict[str, Any] = {}
        for key, own in self.parts.manager.each("saved_config", role=role):
            try:
                json.dumps(dict(own), allow_nan=False)
            except (TypeError, ValueError) as error:
                raise RunError(f"{key} gave values from saved_config that JSON cannot hold: {error}") from error
            fields |= own
        return fields

    def settle(self, *, needed: bool = False) -> None:
        """Waits for the checkpoint that is being written, if there is one. Arguments and errors as of ``save``."""
        if self._saving is not None:
            failure: Exception | None = None
            try:
                self._saving.wait()
            except Exception as error:
                failure = error
            self._saving = None
            if failure is not None:
                self._fail(failure, needed)

    def diverged(self) -> DivergedError | None:
        """Returns the error of a checkpoint whose weights diverged: that says more than what came of it."""
        try:
            if self._saving is not None:
                self._saving.wait()
        except DivergedError as error:
            return error
        except Exception:
            return None  # told at the end
        return None

    def _fail(self, error: Exception, needed: bool) -> None:
        """Raises the error, or logs it where the run may go on."""
        if isinstance(error, DivergedError):
            self._position = None  # what came after is no better: nothing to rescue
        goes_on = isinstance(error, RunError | OSError) and not isinstance(error, DivergedError | LostError)
        if needed or not goes_on or self.parts.config.checkpoint.on_error == "stop":
            raise error
        self._saved = None
        log.warning("%s; the run goes on without this checkpoint (checkpoint.on_error is warn)", error)

    def _up_to_date(self, *, groups: bool) -> bool:
        """Returns True if the newest checkpoint is of this step, and with ``groups`` has every group that has finished since."""
        if self._saved != (self.parts.progress.step, self.parts.progress.pending):
            return False
        if not groups or self._position is None:
            return True
        self._add_finished(self._position)
        return self._saved_groups.issuperset(self._position["finished"])

    def _add_finished(self, position: dict[str, Any]) -> None:
        """Adds finished groups that are not yet in a batch. Where rewards may have a state, it would have counted them."""
        pipeline = self.parts.source.pipeline
        if pipeline is not None and self.parts.config.async_depth and self.scoring is None:
            now, then = self.parts.source.state_dict(), position["stream"]
            if all(now.get(name) == then.get(name) for name in ("ordinal", "passed")):
                position["finished"] = pipeline.finished()

    @property
    def _limit(self) -> int:
        """Number of newest checkpoints that stay while the run goes on; 0: all."""
        keep = self.parts.config.checkpoint.keep
        return WHILE_RUNNING if keep is None else keep

    def _work(self, write: Callable[[], Path]) -> Callable[[], None]:
        """Returns what writes a checkpoint, links to it and removes the oldest, but that with which a lost run begins again."""
        step, best, begun = self.parts.progress.step, self.parts.progress.best_step, self.parts.progress.begun
        run_dir, keep = self.parts.run_dir, self._limit

        def work() -> None:
            write()
            point_to(run_dir, LAST, step)
            if best == step:
                point_to(run_dir, BEST, step)
            keep_checkpoints(run_dir, step, keep, (best, begun))

        return work


async def _held(barrier: Barrier, within_s: float) -> None:
    try:
        await asyncio.wait_for(barrier.hold(), within_s or None)
    except TimeoutError:
        rule = f"a reward with a state scores for more than {within_s:g} s (rollout.stall_s)"
        raise RunError(f"{rule}: its state cannot be saved") from None


async def _release(barrier: Barrier) -> None:
    barrier.release()


def plugin_sources(manager: PluginManager) -> dict[str, str]:
    """Returns key → ``distribution version`` of the installed plugins."""
    return {item.key: item.info.source for item in manager.loaded if item.info.distribution != PYTHON}


def load_plugins(manager: PluginManager, states: Mapping[str, Any], sources: Mapping[str, str]) -> None:
    """Gives plugins their states back, and reports those whose version is not the one that wrote the checkpoint.

    Args:
        sources: ``plugin_sources`` at the time of the checkpoint.

    Raises:
        RunError: a plugin rejects its state.
    """
    now = plugin_sources(manager)
    changed = {key: (then, now[key]) for key, then in sources.items() if now.get(key, then) != then}
    for key, (then, other) in changed.items():
        log.warning("%s is of %s now; %s wrote the checkpoint", key, other, then)
    for key, state in states.items():
        try:
            manager.call(key, "load_state_dict", state=state)
        except Exception as error:
            if key not in changed:
                raise
            raise RunError(f"{error}; its state was written by {changed[key][0]}: install that version again") from error


class Saving:
    """Work on its own daemon thread, so that a disk that hangs does not keep the process from ending.

    Args:
        step: step of the checkpoint.
        work: writes it.
        here: does the work at once, on this thread.
    """

    def __init__(self, step: int, work: Callable[[], None], *, here: bool = False):
        self.step = step
        self._result: Future[None] = Future()
        self._thread: threading.Thread | None = None
        if here:
            self._do(work)
        else:
            self._thread = threading.Thread(target=self._do, args=(work,), name="rlhf-checkpoint", daemon=True)
            self._thread.start()

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
            self._result.set_result(None)
        except BaseException as error:
            self._result.set_exception(error)

    @property
    def done(self) -> bool:
        return self._result.done()

    def abandon(self) -> None:
        if self._thread is not None:
            end_thread(self._thread, ABANDON_S)

    def wait(self) -> None:
        """Waits until it is written. Raises the errors of writing."""
        while not wait([self._result], WAKE_S).done:
            pass
        self._result.result()
