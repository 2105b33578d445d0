"""The online loop: draw, roll out, score, advantages, train, sync, log, checkpoint; one controller for every runtime."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf_host.config.schema import RunConfig
from rlhf_host.data.sources import TaskStream
from rlhf_host.errors import RunError
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.protocols import Runtime, Trainer
from rlhf_host.records.needs import Needs, Outcome, RoleHandle, ScoreContext
from rlhf_host.records.tensors import Advantages, Experience
from rlhf_host.rollouts.collect import Collected, Collector, Draw
from rlhf_host.rollouts.experience import apply_rewards, make_experience, reward_metrics
from rlhf_host.training.evaluate import Evaluation
from rlhf_host.training.events import EventLoop, Interrupted
from rlhf_host.training.records import provenance
from rlhf_host.training.reduction import Metrics, reduced
from rlhf_host.training.trajectories import SavedRollouts, lines, write_lines


@dataclass(slots=True)
class Phases:
    """Seconds per phase of one step, as ``time/NAME``."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, name: str):
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started


@dataclass(slots=True)
class OnlineLoop:
    """The controller. ``step`` counts finished steps; everything that must survive a crash is in ``state_dict``."""

    config: RunConfig
    manager: PluginManager
    needs: Needs
    runtime: Runtime
    handles: Mapping[str, RoleHandle]
    stream: TaskStream | SavedRollouts
    collector: Collector | SavedRollouts
    evaluation: Evaluation | None
    loop: EventLoop
    run_dir: Path
    weights: dict[str, float]
    """Reward alias → weight."""
    save: Callable[[OnlineLoop], None]
    tokenizer: Any = None
    step: int = 0
    version: int = 0
    resumed: bool = False
    best: dict[str, Any] | None = None
    pending: dict[str, float] | None = None
    """Metrics of a finished step whose evaluation was interrupted: evaluated and logged first thing."""
    _saved: tuple[int, dict[str, float] | None] | None = None
    """Step and pending metrics of the checkpoint written last."""

    @property
    def steps(self) -> int:
        """Where training ends: ``train.steps``, or before it where saved rollouts do."""
        steps = self.config.train.steps
        return min(steps, self.stream.steps) if isinstance(self.stream, SavedRollouts) else steps

    def run(self) -> Outcome:
        """Train to ``train.steps``; an interrupt leaves a checkpoint of the last finished step."""
        metrics: dict[str, float] = {}
        try:
            if self.pending is not None:
                metrics = self._finish(self.pending, evaluate=True)
            elif not self.resumed and self.evaluation is not None and self.config.eval.at_start:
                metrics = self._finish({}, evaluate=True)
                if self._checkpoint_due():
                    self.save(self)
            while self.step < self.steps and not self.loop.stop_requested:
                before = self.stream.state_dict()
                try:
                    metrics = self._take_step(self.step + 1)
                except Interrupted:
                    self.stream.load_state_dict(before)
                    raise
                self.step += 1
                metrics = self._finish(metrics, evaluate=self._evaluation_due())
                if self._checkpoint_due():
                    self.save(self)
                    self._saved = (self.step, None)
        except Interrupted:
            pass
        interrupted = self.loop.stop_requested and (self.step < self.steps or self.pending is not None)
        if (interrupted or self.config.checkpoint.final) and self._saved != (self.step, self.pending):
            self.save(self)
        return Outcome("interrupted" if interrupted else "finished", self.step, self.run_dir, metrics=metrics)

    def state_dict(self) -> dict[str, Any]:
        """JSON values: data position, weight version, best metric, what is pending."""
        return {"stream": self.stream.state_dict(), "version": self.version, "best": self.best, "pending": self.pending}

    def load_state_dict(self, step: int, state: Mapping[str, Any]) -> None:
        self.step, self.resumed = step, True
        self.stream.load_state_dict(state["stream"])
        self.version = int(state["version"])
        self.best = state["best"]
        self.pending = state["pending"]

    # --- one step ---------------------------------------------------------------------------------

    def _take_step(self, number: int) -> dict[str, float]:
        """Steps 1 to 8 of the design's loop; the metrics are complete but for evaluation."""
        started = time.perf_counter()
        phases = Phases()
        busy = self._busy()
        context = ScoreContext("train", number, self.handles, self.tokenizer)
        rollout = self.config.rollout
        with phases("rollout"):
            collected = self.loop.run(self.collector.fill(self._draw, self.config.train.batch_size, context))
        experience = make_experience(
            collected.groups,
            self.weights,
            step=number,
            max_new_tokens=rollout.max_new_tokens,
            temperature=rollout.temperature,
        )
        with phases("logprobs"):
            add_outputs(experience, self.runtime.trainer, self.needs, self.config.train.old_logprobs_mode)
        with phases("advantages"):
            found = add_advantages(experience, self.manager)
        metrics = collected.metrics() | reward_metrics(experience) | found
        with phases("train"):
            trained = self._train(experience, number)
        metrics |= trained
        with phases("sync"):
            self.version += 1
            self.sync()
        with phases("log"):
            self._log_trajectories(number, "train", collected)
        tokens = int(experience.action_mask.sum())
        elapsed = time.perf_counter() - started
        outside = elapsed - (self._busy() - busy)
        metrics |= {f"time/{name}": value for name, value in phases.seconds.items()}
        metrics |= {"time/step": elapsed, "time/host": outside, "tokens": float(tokens), "tokens_per_s": tokens / elapsed}
        metrics |= {"version": float(self.version), "epoch": float(self.stream.epoch)} | memory()
        return metrics

    def _draw(self) -> Draw:
        assert isinstance(self.stream, TaskStream)
        task = self.stream.next()
        return Draw(task, self.stream.epoch)

    def _busy(self) -> float:
        """Seconds that models computed so far: sampling, forward, backward, optimizer."""
        return self.runtime.trainer.compute_s + self.runtime.engine.busy_s

    def _train(self, experience: Experience, number: int) -> dict[str, float]:
        """``epochs × minibatches`` optimizer batches.

        Raises:
            RunError: on a non-finite loss or gradient, unless ``train.on_nonfinite`` is ``skip``.
        """
        train = self.config.train
        metrics = Metrics()
        made = skipped = 0
        sampled_now = True
        for epoch in range(train.epochs):
            for rows in self._minibatches(experience, number, epoch):
                batch = experience if rows is None else experience.select(rows)
                update = self.runtime.trainer.update(batch, sampled_now=sampled_now)
                sampled_now = False
                if update.refused is None:
                    metrics.merge(update.metrics)
                    made += 1
                    continue
                dump = self.run_dir / "nonfinite" / f"step-{number:06d}.jsonl"
                origin = provenance(self.config.model_dump(mode="json"), "train")
                write_lines(dump, [lines(number, "train", batch.trajectories, origin)])
                if train.on_nonfinite == "stop":
                    raise RunError(
                        f"step {number}: {update.refused}; after {made} updates in this step, its trajectories are in {dump}"
                    )
                skipped += 1
        return metrics.result() | ({"train/skipped": float(skipped)} if train.on_nonfinite == "skip" else {})

    def _minibatches(self, experience: Experience, number: int, epoch: int) -> list[list[int] | None]:
        """Rows per optimizer update: groups shuffled by seed, step and epoch, dealt out evenly."""
        count = self.config.train.minibatches
        if count == 1:
            return [None]
        order = np.random.default_rng([self.config.seed, number, epoch]).permutation(int(experience.group_id.max()) + 1)
        parts = [set(part.tolist()) for part in np.array_split(order, count)]
        groups = experience.group_id.tolist()
        return [[row for row, group in enumerate(groups) if group in part] for part in parts if part]

    def sync(self) -> None:
        """Bring the weights to the engines."""
        self.loop.run(self.runtime.sync(self.version), interruptible=False)

    # --- after the step ---------------------------------------------------------------------------

    def _evaluation_due(self) -> bool:
        settings, last = self.config.eval, self.step == self.steps
        due = bool(settings.every) and self.step % settings.every == 0
        return self.evaluation is not None and (due or (last and settings.at_end))

    def _checkpoint_due(self) -> bool:
        every = self.config.checkpoint.every
        new_best = self.best is not None and self.best["step"] == self.step
        last = self.step == self.steps and self.config.checkpoint.final
        return not last and (new_best or bool(every and self.step % every == 0))

    def _finish(self, metrics: dict[str, float], *, evaluate: bool) -> dict[str, float]:
        """Evaluate where due, then tell controllers and trackers; the step's row is complete here."""
        if evaluate and self.evaluation is not None:
            self.pending = metrics
            found, trajectories = self.loop.run(self.evaluation.run(self.step))
            metrics = metrics | found
            for key in self.manager.names("log_trajectories"):
                self.manager.call(key, "log_trajectories", step=self.step, split="eval", trajectories=trajectories)
        self.pending = None
        self._remember_best(metrics)
        for hook, arguments in (("step_finished", {}), ("log_metrics", {"step": self.step})):
            for key in self.manager.names(hook):
                self.manager.call(key, hook, metrics=metrics, **arguments)
        return metrics

    def _remember_best(self, metrics: Mapping[str, float]) -> None:
        checkpoint = self.config.checkpoint
        value = metrics.get(checkpoint.best) if checkpoint.best else None
        if value is None or not math.isfinite(value):
            return
        sign = 1.0 if checkpoint.best_mode == "max" else -1.0
        if self.best is None or sign * value > sign * self.best["value"]:
            self.best = {"step": self.step, "value": value}

    def _log_trajectories(self, step: int, split: str, collected: Collected) -> None:
        rows = collected.trajectories_in_order()
        for key in self.manager.names("log_trajectories"):
            self.manager.call(key, "log_trajectories", step=step, split=split, trajectories=rows)


def add_outputs(experience: Experience, trainer: Trainer, needs: Needs, mode: str) -> None:
    """Log-probabilities and values that plugins, or the mode of ``old_logprobs``, need before advantages, in place."""
    for wanted in sorted(needs.outputs):
        role, _, what = wanted.rpartition(".")
        if role and what == "logprobs":
            experience.logprobs[role] = trainer.outputs(role, "logprobs", experience)
        elif role and what == "values":
            experience.values[role] = trainer.outputs(role, "values", experience)
        elif role and what == "bootstrap":
            experience.bootstrap_value = trainer.outputs(role, "scores", experience)
    if mode == "recompute":
        known = experience.logprobs.get("actor")
        experience.old_logprobs = trainer.outputs("actor", "logprobs", experience) if known is None else known
    elif mode == "sampler":
        experience.old_logprobs = experience.sampler_logprobs


def add_advantages(experience: Experience, manager: PluginManager) -> dict[str, float]:
    """Rewards transformed and shaped, then advantages, in place; metrics of them.

    Raises:
        RunError: when a plugin gives another shape or non-finite numbers.
    """
    apply_rewards(experience, manager)
    found: Advantages = manager.one("compute_advantages", experience=experience)
    for name, value in (("advantages", found.advantages), ("returns", found.returns)):
        if value is None:
            continue
        if value.shape != experience.action_mask.shape:
            raise RunError(f"compute_advantages gave {name} {list(value.shape)}, expected {list(experience.action_mask.shape)}")
        if not bool(torch.isfinite(torch.where(experience.loss_mask, value, 0.0)).all()):
            raise RunError(f"compute_advantages gave non-finite {name} at step {experience.step}")
    experience.advantages = found.advantages.to(torch.float32)
    experience.returns = None if found.returns is None else found.returns.to(torch.float32)
    kept = experience.advantages[experience.loss_mask].double()
    metrics = reduced(found.metrics)
    if kept.numel():
        metrics |= {"advantages/mean": float(kept.mean()), "advantages/std": float(kept.std(correction=0))}
    level = _same_within(experience.rewards, experience.group_id)
    metrics["groups/no_variance"] = level
    _note_advantages(experience)
    return metrics


def _note_advantages(experience: Experience) -> None:
    """Each trajectory is told its mean advantage, for logs."""
    assert experience.advantages is not None
    counts = experience.loss_mask.sum(-1)
    sums = torch.where(experience.loss_mask, experience.advantages, 0.0).double().sum(-1)
    means = (sums / counts.clamp(min=1)).tolist()
    for trajectory, mean, count in zip(experience.trajectories, means, counts.tolist(), strict=True):
        trajectory.advantage = mean if count else None


def memory() -> dict[str, float]:
    """Peak resident memory of this process in GB, and of CUDA where it is used."""
    scale = 1e9 if sys.platform == "darwin" else 1e6
    found = {"memory/rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / scale}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["memory/cuda_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return found


def _same_within(rewards: Tensor, group_id: Tensor) -> float:
    """Fraction of groups in which every reward is the same: they teach nothing."""
    count = int(group_id.max()) + 1
    wide = rewards.double()
    low = torch.zeros(count, dtype=torch.float64).scatter_reduce(0, group_id, wide, "amin", include_self=False)
    high = torch.zeros(count, dtype=torch.float64).scatter_reduce(0, group_id, wide, "amax", include_self=False)
    return float((high - low <= 1e-6 * torch.maximum(low.abs(), high.abs()).clamp(min=1.0)).double().mean())
