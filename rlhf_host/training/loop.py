"""The loop of every run: a batch from its source, train, sync, log, checkpoint; one controller for every runtime."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhf_host.config.run_dir import BEST, LAST
from rlhf_host.config.schema import RunConfig
from rlhf_host.errors import DivergedError, LostError, RunError, near_matches
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.protocols import Generator, Runtime, Update
from rlhf_host.records.episodes import Trajectory
from rlhf_host.records.needs import Adjust, Needs, Outcome, RoleHandle, Stop
from rlhf_host.records.tensors import Experience
from rlhf_host.rollouts.experience import joined
from rlhf_host.rollouts.gate import Barrier, Gate
from rlhf_host.runs.signs import Signs
from rlhf_host.training.checkpoints import (
    Checkpoint,
    copy_checkpoint,
    keep_checkpoints,
    plain_state,
    point_to,
    remove_leftovers,
)
from rlhf_host.training.events import EventLoop, Interrupted
from rlhf_host.training.ledger import Ledger
from rlhf_host.training.measures import of_engine, of_sync, speed
from rlhf_host.training.memory import memory
from rlhf_host.training.pending import read_pending, write_pending
from rlhf_host.training.plugin_states import load_plugins, plugin_sources
from rlhf_host.training.records import provenance
from rlhf_host.training.reduction import Metrics
from rlhf_host.training.saved_rows import lines, write_lines
from rlhf_host.training.saving import Saving
from rlhf_host.training.source import Source, timed

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Loop:
    """The controller. ``step`` counts finished steps; ``save`` writes everything that must survive a crash."""

    config: RunConfig
    manager: PluginManager
    needs: Needs
    runtime: Runtime
    handles: Mapping[str, RoleHandle]
    source: Source
    evaluate: Callable[[int], tuple[dict[str, float], Sequence[Trajectory]]] | None
    """Metrics under ``eval/`` and rows of the held-out data, after a step."""
    loop: EventLoop
    run_dir: Path
    planned: int
    """Steps of the whole run."""
    gate: Gate | None = None
    """Before the engine, where there is one."""
    scoring: Barrier | None = None
    """Before rewards whose state changes beside the steps, where there are some."""
    in_flight: bool = False
    """New weights come while requests are answered."""
    tokenizer: Any = None
    step: int = 0
    version: int = 0
    resumed: bool = False
    best: dict[str, Any] | None = None
    pending: dict[str, float] | None = None
    """Metrics of a finished step that is not logged yet: evaluated where due and logged first thing."""
    rates: dict[str, float] = field(default_factory=dict)
    """Role → the peak learning rate that plugins have set."""
    begun: int | None = None
    """The step of the checkpoint from which the run went on."""
    stopped: str | None = None
    """Why a plugin ends the run after this step."""
    signs: Signs = field(default_factory=Signs)
    ledger: Ledger = field(init=False)
    _position: dict[str, Any] | None = None
    """Beside the weights, all that a checkpoint of ``step`` has; ``None`` while the weights are on their way to the next."""
    _saved: tuple[int, dict[str, float] | None] | None = None
    """Step and pending metrics of the checkpoint written last, or tried."""
    _saving: Saving | None = None
    """The checkpoint that is being written."""
    _stood_still_s: float = 0.0
    """For checkpoints, since the last step."""

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.run_dir)

    @property
    def steps(self) -> int:
        """Where training ends: as planned, or before it where saved rollouts do."""
        return self.planned if self.source.steps is None else min(self.planned, self.source.steps)

    def run(self) -> Outcome:
        """Train to the last step; an interrupt leaves a checkpoint of the last finished step."""
        metrics: dict[str, float] = {}
        remove_leftovers(self.run_dir)
        position = self._stand_still()
        self.ledger.go_back(self.step, position["stream"])
        try:
            if self.pending is not None:
                metrics = self._finish(self.pending, evaluate=not self.step or self._evaluation_due())
            elif not self.resumed and self.evaluate is not None and self.config.eval.at_start:
                metrics = self._finish({}, evaluate=True)
                if self._checkpoint_due():
                    self.save()
            while self.step < self.steps and self.stopped is None and not self.loop.stop_requested:
                metrics = self._take_step(self.step + 1)
                self.step += 1
                metrics = self._finish(metrics, evaluate=self._evaluation_due())
                if self._saving is not None and self._saving.done:
                    self.settle()
                if self._checkpoint_due():
                    self.save()
        except Interrupted:
            pass
        except RunError:
            if (diverged := self._diverged()) is not None:
                raise diverged from None
            raise
        unfinished = self.pending is not None or (self.stopped is None and self.step < self.steps)
        interrupted = self.loop.stop_requested and unfinished
        needed = interrupted or self.config.checkpoint.final
        if needed and self._saved != (self.step, self.pending):
            self.save(needed=True)
        self.settle(needed=needed)
        if self.begun is not None:  # nobody begins again with it
            keep_checkpoints(self.run_dir, self.step, self.config.checkpoint.keep, (self.best["step"] if self.best else None,))
        status: Any = "interrupted" if interrupted else "finished"
        return Outcome(status, self.step, self.run_dir, metrics=metrics, reason=self.stopped)

    def _stand_still(self) -> dict[str, Any]:
        """Note where the data is, the states of plugins and the random numbers: what comes next may fail halfway."""
        if self.scoring is not None:
            self.loop.run(_held(self.scoring, self.config.rollout.stall_s), interruptible=False)
        plugins = {key: plain_state(state, key) for key, state in self.manager.each("state_dict")}
        self._position = {
            "stream": self.source.state_dict(),
            "finished": self.source.finished(),
            "plugins": plugins,
            "torch_rng": torch.get_rng_state(),
        }
        if self.scoring is not None:
            self.loop.run(_release(self.scoring), interruptible=False)
        return self._position

    def _add_finished(self, position: dict[str, Any]) -> None:
        """What is over meanwhile, unless a batch has it. Where rewards may have a state, it would have counted that."""
        if self.config.async_depth and self.scoring is None:
            now, then = self.source.state_dict(), position["stream"]
            if all(now.get(name) == then.get(name) for name in ("ordinal", "passed")):
                position["finished"] = self.source.finished()

    def rescue(self) -> None:
        """Write a checkpoint of the last finished step of a run that fails, unless there is one or the weights have moved."""
        if self.step and self._position is not None and self._saved != (self.step, self.pending):
            try:
                self.save()
            except Exception as error:
                log.warning("step %d is not saved: %s", self.step, error)
        self.close()

    def close(self) -> None:
        """Wait for the checkpoint that is being written; a failure is logged."""
        if (saving := self._saving) is not None:
            try:
                self.settle(needed=True)
            except Exception as error:
                log.warning("step %d is not saved: %s", saving.step, error)

    def save(self, *, needed: bool = False) -> None:
        """Copy a checkpoint and begin to write it, once the one before is written.

        Args:
            needed: a failure ends the run whatever ``checkpoint.on_error`` says.

        Raises:
            RunError: this one or the one before cannot be written, or the weights diverged.
        """
        assert self._position is not None
        started = time.perf_counter()
        self.settle()
        self._saved = (self.step, self.pending)
        self._add_finished(self._position)
        if "ordinal" in self._position["stream"]:
            self.ledger.check(self._position["stream"])
        tensors = {name: self._position[name] for name in ("plugins", "torch_rng")}
        state = {name: getattr(self, name) for name in ("version", "best", "pending", "rates", "stopped")}
        state |= {"stream": self._position["stream"], "plugins": plugin_sources(self.manager)}
        savers = {need.name: partial(self.runtime.save_role, need.name) for need in self.needs.roles if need.trainable}
        pending = partial(write_pending, self._position["finished"])
        try:
            self.ledger.flush()
            write = copy_checkpoint(self.run_dir, self.step, state, tensors, savers, self.runtime.save_state, pending)
        except RunError as error:
            self._heed_failure(error, needed)
        else:
            best = self.best["step"] if self.best else None
            work = partial(_write, write, self.run_dir, self.step, self.config.checkpoint.keep, best, self.begun)
            self._saving = Saving(self.step, work, here=self.config.debug)
        self._stood_still_s += time.perf_counter() - started

    def settle(self, *, needed: bool = False) -> None:
        """Wait for the checkpoint that is being written, if there is one. Arguments and errors as of ``save``."""
        if self._saving is not None:
            failure: Exception | None = None
            try:
                self._saving.wait()
            except Exception as error:
                failure = error
            self._saving = None
            if failure is not None:
                self._heed_failure(failure, needed)

    def _heed_failure(self, error: Exception, needed: bool) -> None:
        """Raise it, or log it where the run may go on."""
        if isinstance(error, DivergedError):
            self._position = None  # what came after is no better: nothing to rescue
        goes_on = isinstance(error, RunError | OSError) and not isinstance(error, DivergedError | LostError)
        if needed or not goes_on or self.config.checkpoint.on_error == "stop":
            raise error
        self._saved = None
        log.warning("%s; the run goes on without this checkpoint (checkpoint.on_error is warn)", error)

    def _diverged(self) -> DivergedError | None:
        """Whether the weights of the checkpoint that is being written diverged: that says more than what came of it."""
        try:
            if self._saving is not None:
                self._saving.wait()
        except DivergedError as error:
            return error
        except Exception:
            return None  # told at the end
        return None

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from it."""
        state = checkpoint.state
        self.step, self.begun, self.resumed = checkpoint.step, checkpoint.step, True
        self._saved = (checkpoint.step, state["pending"])
        self.source.load_state_dict(state["stream"], read_pending(checkpoint.path))
        self.version = int(state["version"])
        self.best = state["best"]
        self.pending, self.stopped = state["pending"], state.get("stopped")
        for role, rate in state["rates"].items():
            self._set_rate(role, rate)
        self.runtime.load_state(checkpoint.optimizers)
        torch.set_rng_state(checkpoint.tensors["torch_rng"])
        load_plugins(self.manager, checkpoint.tensors["plugins"], state["plugins"])

    def _take_step(self, number: int) -> dict[str, float]:
        """One batch, trained on and brought to the engines; the metrics are complete but for evaluation."""
        started = time.perf_counter()
        trainer, engine = self.runtime.trainer, self.runtime.engine
        computed, generated = trainer.compute_s, engine.busy_s if engine is not None else 0.0
        drawn = self.source.draw(number, self.version)
        times, measured = dict(drawn.times), dict[str, float]()
        if self.gate is not None and self.config.async_depth and any(target.in_place for target in self.runtime.targets):
            with timed(times, "hold"):
                self.loop.run(self._hold(self.gate))  # the engine would sample from weights that an update changes
        self._position = None
        with timed(times, "train"):
            of_updates = self._train(drawn.batch, number, drawn.sampled)
        version = self.version
        if engine is not None:
            with timed(times, "sync"):
                self.version += 1
                self.sync()
            measured = self.loop.run(self._measure(engine), interruptible=False)
        with timed(times, "log"):
            if drawn.draws:
                self.ledger.note(number, version, drawn.draws)
            self.manager.report("log_trajectories", step=number, split="train", trajectories=drawn.trajectories)
        tokens = int(drawn.batch.action_mask.sum())
        elapsed = time.perf_counter() - started
        computed = trainer.compute_s - computed  # forward, backward, optimizer
        idle = {"time/idle_trainer": max(0.0, elapsed - computed)}
        if engine is not None:
            generated = engine.busy_s - generated
            idle["time/idle_engines"] = max(0.0, elapsed - generated)
        outside = max(0.0, elapsed - computed - generated)
        own = idle | {"time/step": elapsed, "time/host": outside, "tokens": float(tokens), "tokens_per_s": tokens / elapsed}
        own |= {"version": float(self.version), "epoch": float(drawn.epoch)} | times
        if self._stood_still_s:
            own["time/checkpoint"], self._stood_still_s = self._stood_still_s, 0.0
        for name, used in memory().items():
            own[name] = max(used, of_updates.pop(name, 0.0))  # ranks in other processes say theirs
        return joined(drawn.metrics, of_updates, measured, own)

    def _train(self, experience: Experience, number: int, sampled: bool) -> dict[str, float]:
        """``epochs × minibatches`` optimizer batches. Raises ``RunError`` on a non-finite loss or gradient, unless
        ``train.on_nonfinite`` is ``skip``."""
        train = self.config.train
        metrics = Metrics()
        started = time.perf_counter()
        made: list[Update] = []
        updates = skipped = 0
        sampled_now = sampled
        for epoch in range(train.epochs):
            for batch in self._minibatches(experience, number, epoch):
                update = self.runtime.trainer.update(batch, sampled_now=sampled_now)
                made.append(update)
                sampled_now = False
                if update.refused is None:
                    metrics.merge(update.metrics)
                    updates += 1
                    continue
                dump = self.run_dir / "nonfinite" / f"step-{number:06d}.jsonl"
                origin = provenance(self.config.model_dump(mode="json"), "train")
                write_lines(dump, [lines(number, "train", batch.trajectories, origin)])
                if train.on_nonfinite == "stop":
                    raise RunError(
                        f"step {number}: {update.refused}; after {updates} updates in this step, its trajectories are in {dump}"
                    )
                skipped += 1
        roles = [need.name for need in self.needs.roles if need.trainable]
        result = metrics.result()
        result |= speed(made, time.perf_counter() - started)
        if updates and not any(name in result for name in ("loss", *(f"{role}/loss" for role in roles))):
            raise RunError(
                f"step {number}: no plugin gave a loss term, so nothing was trained: compute_loss must return or yield one"
                f" for {' or '.join(roles)}"
            )
        return result | ({"train/skipped": float(skipped)} if train.on_nonfinite == "skip" else {})

    def _minibatches(self, experience: Experience, number: int, epoch: int) -> Iterator[Experience]:
        """One per optimizer update: groups shuffled by seed, step and epoch, dealt out evenly."""
        count = self.config.train.minibatches
        if count == 1:
            yield experience
            return
        order = np.random.default_rng([self.config.seed, number, epoch]).permutation(int(experience.group_id.max()) + 1)
        parts = [set(part.tolist()) for part in np.array_split(order, count)]
        groups = experience.group_id.tolist()
        for part in filter(None, parts):
            yield experience.select([row for row, group in enumerate(groups) if group in part])

    def sync(self) -> None:
        """Bring the weights to the engines, if there are some."""
        if self.gate is not None:
            self.loop.run(self._publish(self.gate), interruptible=False)

    async def _measure(self, engine: Generator) -> dict[str, float]:
        return await of_sync(self.runtime) | await of_engine(engine)

    async def _hold(self, gate: Gate) -> None:
        await self.source.meet()
        await gate.hold()

    async def _publish(self, gate: Gate) -> None:
        if self.in_flight:
            gate.close()  # an engine refuses while it loads
        else:
            await self._hold(gate)
        await self.runtime.sync(self.version)
        gate.release()
        await self.source.published(self.version)

    def _evaluation_due(self) -> bool:
        settings, last = self.config.eval, self.step == self.steps
        due = bool(settings.every) and self.step % settings.every == 0
        return self.evaluate is not None and (due or (last and settings.at_end))

    def _checkpoint_due(self) -> bool:
        every = self.config.checkpoint.every
        new_best = self.best is not None and self.best["step"] == self.step
        last = self.step == self.steps and self.config.checkpoint.final
        return not last and (new_best or bool(every and self.step % every == 0))

    def _finish(self, metrics: dict[str, float], *, evaluate: bool) -> dict[str, float]:
        """Evaluate where due, then tell controllers and trackers; the step's row is complete here."""
        self.pending = metrics
        self._stand_still()
        metrics = self._evaluate(metrics) if evaluate else metrics
        self._remember_best(metrics)
        if self.step:
            for report in self.signs.look(metrics):
                log.warning("step %d: %s", self.step, report)
            self._heed(self.manager.each("step_finished", step=self.step, metrics=metrics))
        if self.stopped is not None and not evaluate and self.config.eval.at_end:
            metrics = self._evaluate(metrics)
            self._remember_best(metrics)
        self.manager.report("log_metrics", step=self.step, metrics=metrics)
        self.pending = None
        self._stand_still()
        return metrics

    def _evaluate(self, metrics: dict[str, float]) -> dict[str, float]:
        if self.evaluate is None:
            return metrics
        self.loop.run(self.source.meet())
        evaluated, trajectories = self.evaluate(self.step)
        self.manager.report("log_trajectories", step=self.step, split="eval", trajectories=trajectories)
        return metrics | evaluated

    def _heed(self, answers: Iterable[tuple[str, Stop | Adjust]]) -> None:
        """Do what plugins answered to ``step_finished``. Raises ``RunError`` for another answer, and for a setting that there is
        not, that two plugins set, or that cannot have the value."""
        wanted: dict[str, tuple[str, float]] = {}
        for key, answer in answers:
            if isinstance(answer, Stop):
                self.stopped = self.stopped or f"{key}: {answer.reason}"
                continue
            for name, value in answer.settings.items():
                if name in wanted:
                    raise RunError(f"{wanted[name][0]} and {key} both adjust {name} after step {self.step}: leave one out")
                if isinstance(value, bool) or not isinstance(value, Real):
                    raise RunError(f"{key} adjusts {name} to {value!r} after step {self.step}, expected a number")
                wanted[name] = (key, float(value))
        rates = {f"{need.name}.lr": need.name for need in self.needs.roles if need.trainable}
        owners = {self.manager.by_key[key].alias: key for key in self.manager.names("adjust")}
        options: dict[str, dict[str, float]] = {}
        for name, (key, value) in wanted.items():
            alias, _, option = name.partition(".")
            if name not in rates and alias not in owners:
                choices = ", ".join([*rates, *(f"{owner}.NAME" for owner in owners)])
                raise RunError(f"{key} adjusts {name}, which does not exist; there is {choices}")
            if not math.isfinite(value) or (name in rates and value < 0):
                least = " that is 0 or more" if name in rates else ""
                raise RunError(f"{key} adjusts {name} to {value:g} after step {self.step}, expected a finite number{least}")
            if name not in rates:
                options.setdefault(owners[alias], {})[option] = value
        for name in wanted.keys() & rates.keys():
            self._set_rate(rates[name], wanted[name][1])
        for key, settings in options.items():
            self.manager.call(key, "adjust", settings=settings)

    def _set_rate(self, role: str, rate: float) -> None:
        self.rates[role] = rate
        self.runtime.trainer.adjust(role, lr=rate)

    def _remember_best(self, metrics: Mapping[str, float]) -> None:
        checkpoint, name = self.config.checkpoint, self.config.checkpoint.best
        if name is None:
            return
        if name not in metrics:
            due = any(key.startswith("eval/") for key in metrics) if name.startswith("eval/") else self.step > 0
            if due and self.best is None:
                near = near_matches(name, metrics)
                again = "resumed, the run needs --checkpoint.best NAME"
                raise RunError(f"checkpoint.best is {name}, and there is no such metric{near}; {again}")
            return
        value = metrics[name]
        if not math.isfinite(value):
            return
        sign = 1.0 if checkpoint.best_mode == "max" else -1.0
        if self.best is None or sign * value > sign * self.best["value"]:
            self.best = {"step": self.step, "value": value}


async def _held(barrier: Barrier, within_s: float) -> None:
    try:
        await asyncio.wait_for(barrier.hold(), within_s or None)
    except TimeoutError:
        rule = f"a reward with a state scores for more than {within_s:g} s (rollout.stall_s)"
        raise RunError(f"{rule}: its state cannot be noted") from None


async def _release(barrier: Barrier) -> None:
    barrier.release()


def _write(write: Callable[[], Path], run_dir: Path, step: int, keep: int, best: int | None, begun: int | None) -> None:
    """Write a checkpoint, link to it and remove the oldest, but that with which a process that is lost begins again."""
    write()
    point_to(run_dir, LAST, step)
    if best == step:
        point_to(run_dir, BEST, step)
    keep_checkpoints(run_dir, step, keep, (best, begun))
