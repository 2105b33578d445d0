"""The loop of every run: draw a batch, train on it, bring the weights to the engines, report, keep a checkpoint."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rlhf_host.errors import RunError
from rlhf_host.records.episodes import Trajectory
from rlhf_host.records.metric_names import RowMetrics
from rlhf_host.records.needs import Outcome
from rlhf_host.rollouts.collect import NoBatchError
from rlhf_host.rollouts.experience import joined
from rlhf_host.rollouts.gate import Gate
from rlhf_host.rollouts.watch import watched
from rlhf_host.runs.signs import Signs
from rlhf_host.spans import span
from rlhf_host.training.adjustments import adjustments
from rlhf_host.training.components import RunComponents
from rlhf_host.training.events import Interrupted
from rlhf_host.training.keeper import CheckpointKeeper
from rlhf_host.training.measures import of_engines, of_plugins
from rlhf_host.training.memory import memory
from rlhf_host.training.optimize import optimize
from rlhf_host.training.source import Drawn, timed

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Loop:
    """The controller of a run, the same on every runtime."""

    parts: RunComponents
    keeper: CheckpointKeeper
    evaluate: Callable[[int], tuple[dict[str, float], Sequence[Trajectory]]] | None
    """Metrics under ``eval/`` and rows of the held-out data, after a step."""
    planned: int
    """Steps of the whole run."""
    gate: Gate | None = None
    """Before the engine, where there is one."""
    in_flight: bool = False
    """New weights come while requests are answered."""
    signs: Signs = field(default_factory=Signs)
    row_metrics: RowMetrics = field(default_factory=RowMetrics)

    @property
    def steps(self) -> int:
        """The last step: as planned, or before it where saved rollouts do."""
        return self.planned if self.parts.source.steps is None else min(self.planned, self.parts.source.steps)

    @property
    def last(self) -> bool:
        return self.parts.progress.step == self.steps

    @property
    def roles(self) -> list[str]:
        """Those that are trained."""
        return [need.name for need in self.parts.needs.roles if need.trainable]

    def run(self) -> Outcome:
        """Trains to the last step; an interrupt leaves a checkpoint of the last finished step."""
        progress, keeper = self.parts.progress, self.keeper
        metrics: dict[str, float] = {}
        keeper.begin()
        try:
            if progress.pending is not None:
                metrics = self._report(progress.pending, evaluate=not progress.step or self._evaluation_due())
            elif progress.begun is None and self.evaluate is not None and self.parts.config.eval.at_start:
                metrics = self._report({}, evaluate=True)
                keeper.after_step(last=self.last)
            while progress.step < self.steps and progress.stopped is None and not self.parts.events.stop_requested:
                with span("step"):
                    metrics = self._take_step(progress.step + 1)
                progress.step += 1
                metrics = self._report(metrics, evaluate=self._evaluation_due())
                with span("checkpoint"):
                    keeper.after_step(last=self.last)
        except Interrupted:
            pass
        except RunError:
            if (diverged := keeper.diverged()) is not None:
                raise diverged from None
            raise
        unfinished = progress.pending is not None or (progress.stopped is None and progress.step < self.steps)
        interrupted = self.parts.events.stop_requested and unfinished
        keeper.end(interrupted=interrupted)
        if metrics.get("correction/unused") and not interrupted:
            keys = ", ".join(self.parts.manager.names("importance_weights"))
            raise RunError(f"{keys}: no loss term took its weights in the whole run; leave it out, or choose another loss")
        status: Literal["interrupted", "finished"] = "interrupted" if interrupted else "finished"
        return Outcome(status, progress.step, self.parts.run_dir, metrics=metrics, reason=progress.stopped)

    def _take_step(self, number: int) -> dict[str, float]:
        """Trains on one batch and brings the weights to the engines; the metrics are complete but for evaluation."""
        started = time.perf_counter()
        parts, version = self.parts, self.parts.progress.version
        trainer, engine = parts.runtime.trainer, parts.runtime.engine
        computed, generated = trainer.compute_s, engine.busy_s if engine is not None else 0.0
        try:
            drawn = parts.source.draw(number, version)
        except NoBatchError as error:
            parts.ledger.note_failed(number, version, error.draws)
            raise
        times, measured = dict(drawn.times), dict[str, float]()
        if self.gate is not None and parts.config.async_depth and any(target.in_place for target in parts.runtime.targets):
            with timed(times, "hold"):
                parts.events.run(self.hold(self.gate))  # the engine would sample from weights that an update changes
        self.keeper.forget()
        with timed(times, "train"):
            of_updates = optimize(
                trainer,
                drawn.batch,
                number,
                sampled=drawn.sampled,
                config=parts.config,
                roles=[need.name for need in parts.needs.roles if need.trainable and number > need.idle_steps],
                run_dir=parts.run_dir,
                beside=drawn.beside,
            )
            for need in parts.needs.roles:
                if need.moves and need.follows is not None and number % need.follows.every == 0:
                    trainer.follow(need.name)
        if engine is not None:
            with timed(times, "sync"):
                parts.progress.version += 1
                parts.events.run(self.sync(), interruptible=False)
            measured = parts.events.run(of_engines(parts.runtime, parts.bring), interruptible=False)
        with timed(times, "log"):
            if drawn.draws:
                parts.ledger.note(number, version, drawn.draws)
            parts.manager.report("log_trajectories", step=number, split="train", trajectories=drawn.trajectories)
        elapsed = time.perf_counter() - started
        computed = trainer.compute_s - computed  # forward, backward, optimizer
        busy = engine.busy_s - generated if engine is not None else None
        own = _own_metrics(drawn, elapsed, computed, busy) | times
        own["version"] = float(parts.progress.version)
        if self.keeper.waited_s:
            own["time/checkpoint"], self.keeper.waited_s = self.keeper.waited_s, 0.0
        for name, used in memory().items():
            own[name] = max(used, of_updates.pop(name, 0.0))  # ranks in other processes say theirs
        return self.row_metrics.merged_with(joined(drawn.metrics, of_updates, measured, own), drawn.row_metrics)

    def _report(self, metrics: dict[str, float], *, evaluate: bool) -> dict[str, float]:
        """Evaluates where due, then tells plugins and trackers; the step's row is complete here."""
        progress = self.parts.progress
        progress.pending = metrics
        self.keeper.note()
        metrics = self._evaluate(metrics) if evaluate else metrics
        metrics = joined(metrics, *of_plugins(self.parts.manager, progress.step))
        self.keeper.compare(metrics)
        if progress.step:
            for sign in self.signs.look(metrics):
                log.warning("step %d: %s", progress.step, sign)
            self.adjust(metrics)
        if progress.stopped is not None and not evaluate and self.parts.config.eval.at_end:
            metrics = self._evaluate(metrics)
            self.keeper.compare(metrics)
        self.parts.manager.report("log_metrics", step=progress.step, metrics=metrics)
        progress.pending = None
        self.keeper.note()
        return metrics

    def _evaluation_due(self) -> bool:
        settings = self.parts.config.eval
        due = bool(settings.every) and self.parts.progress.step % settings.every == 0
        return self.evaluate is not None and (due or (self.last and settings.at_end))

    def _evaluate(self, metrics: dict[str, float]) -> dict[str, float]:
        if self.evaluate is None:
            return metrics
        if self.parts.events.stop_requested:
            raise Interrupted
        if (pipeline := self.parts.source.pipeline) is not None:
            self.parts.events.run(pipeline.wait_until_over())
        with span("evaluate"):
            evaluated, trajectories = self.evaluate(self.parts.progress.step)
        self.parts.manager.report("log_trajectories", step=self.parts.progress.step, split="eval", trajectories=trajectories)
        return metrics | evaluated

    def adjust(self, metrics: dict[str, float]) -> None:
        """Does what plugins ask for after the step."""
        answers = self.parts.manager.each("step_finished", step=self.parts.progress.step, metrics=metrics)
        adjustable = {self.parts.manager.by_key[key].alias: key for key in self.parts.manager.names("adjust")}
        asked = adjustments(answers, self.parts.progress.step, self.roles, adjustable)
        self.parts.progress.stopped = self.parts.progress.stopped or asked.stop
        for role, rate in asked.rates.items():
            self.parts.progress.rates[role] = rate
            self.parts.runtime.trainer.adjust(role, lr=rate)
        for key, settings in asked.options.items():
            self.parts.manager.call(key, "adjust", settings=settings)

    async def sync(self) -> None:
        """Brings the weights to the engines, if there are some."""
        if self.gate is None:
            return
        if self.in_flight:
            self.gate.close()  # an engine refuses while it loads
        else:
            await self.hold(self.gate)
        await self.parts.runtime.sync(self.parts.progress.version)
        self.gate.release()
        if (pipeline := self.parts.source.pipeline) is not None:
            await pipeline.published(self.parts.progress.version)

    async def hold(self, gate: Gate) -> None:
        """Waits until no request is under way; new ones wait."""
        if (pipeline := self.parts.source.pipeline) is not None:
            await pipeline.wait_until_over()
        stall_s = self.parts.config.rollout.stall_s
        await watched(gate.hold(), lambda: gate.in_flight, lambda: f"new weights wait for {gate.in_flight} requests", stall_s)


def _own_metrics(drawn: Drawn, elapsed: float, computed: float, busy: float | None) -> dict[str, float]:
    """Returns what the loop itself measures of a step; ``busy``: seconds in which the engine generated."""
    tokens = float(drawn.batch.action_mask.sum())
    own = {"time/step": elapsed, "tokens": tokens, "tokens_per_s": tokens / elapsed, "epoch": float(drawn.epoch)}
    own |= {"time/host": max(0.0, elapsed - computed - (busy or 0.0)), "time/idle_trainer": max(0.0, elapsed - computed)}
    return own if busy is None else own | {"time/idle_engines": max(0.0, elapsed - busy)}
