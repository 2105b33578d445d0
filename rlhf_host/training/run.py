"""A run from its configuration to its outcome: what is checked, started, resumed and written, in order."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from rlhf_host.command import rlhf
from rlhf_host.config.choices import merge_needs
from rlhf_host.config.defaults import RunTraits
from rlhf_host.config.run_dir import CONFIG, checkpoint_dirs, locked
from rlhf_host.config.schema import RunConfig
from rlhf_host.data.sources import NO_ROWS, PythonRows
from rlhf_host.data.stream import Draw
from rlhf_host.errors import LostError, RunError, UserError
from rlhf_host.models.loading import load_tokenizer
from rlhf_host.phases import phase
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.protocols import Generator
from rlhf_host.records.episodes import Generation, Sampling, Task
from rlhf_host.records.needs import Needs, Outcome, RoleHandle, RoleNeed, RunContext, ScoreContext
from rlhf_host.rollouts.collect import Collected
from rlhf_host.training import assemble
from rlhf_host.training.assemble import Inputs, Started
from rlhf_host.training.checkpoints import Checkpoint, load_checkpoint, model_written, save_model
from rlhf_host.training.events import EventLoop, Interrupted, event_loop
from rlhf_host.training.loop import Loop
from rlhf_host.training.precompute import precomputed, without
from rlhf_host.training.records import provenance
from rlhf_host.training.run_files import note_begin, note_end, remove_start, write_start
from rlhf_host.training.saved_rows import check_output, lines, write_lines

log = logging.getLogger(__name__)

Running: TypeAlias = tuple[Started, EventLoop, Outcome]


def train(config: RunConfig, manager: PluginManager, *, resume: Path | None = None, rows: PythonRows = NO_ROWS) -> Outcome:
    """Train as configured; the run directory is ``config.run_dir``.

    Args:
        config: with ``run_dir`` set.
        manager: the selected plugins.
        resume: the run directory whose newest checkpoint is taken up; without a checkpoint the run starts over in it.
        rows: data given in Python.

    Raises:
        UserError: for input that cannot be used; nothing has been written then.
        RunError: when the run had to stop.
    """
    if config.run_dir is None:
        raise UserError("the run has no run_dir")
    run_dir = Path(config.run_dir)
    with locked(run_dir):
        if resume is None and (run_dir / CONFIG).exists():
            raise UserError(f"another run was begun in {run_dir} meanwhile: choose another --run-dir")
        inputs = assemble.read_inputs(config, rows, manager, merge_needs(manager))
        restarts = 0
        while True:
            try:
                return _attempt(config, manager, inputs, run_dir, resume)
            except RunError as error:
                if restarts == config.max_restarts or not (_is_lost(error) and checkpoint_dirs(run_dir)):
                    raise
                restarts, resume = restarts + 1, run_dir
                log.error("%s; this is done now (restart %d of %d)", error, restarts, config.max_restarts)


def _attempt(config: RunConfig, manager: PluginManager, inputs: Inputs, run_dir: Path, resume: Path | None) -> Outcome:
    """Start everything, train to the end, and close everything."""
    needs = merge_needs(manager)
    checkpoint = load_checkpoint(resume) if resume else None
    if checkpoint is not None:
        _refuse_finished(config, checkpoint, run_dir, inputs)
        _refuse_passed(config, checkpoint)
    updates = inputs.steps(config) * config.train.updates_per_batch
    models = {need.name: checkpoint.role(need.name) for need in needs.roles if need.trainable} if checkpoint else {}
    kept = precomputed(config, manager, needs, inputs)
    start = assemble.runtime_start(config, manager, without(needs, kept), inputs.tokenizer, updates, models)
    started = assemble.start_runtime(config, start)
    started.kept = kept
    with event_loop(config.debug) as events:
        try:
            write_start(config, manager, run_dir, checkpoint.step if checkpoint else 0)
            loop = _loop(config, manager, started, inputs, events, run_dir)
            notices = list(inputs.notices)
            if checkpoint is not None:
                loop.restore(checkpoint)
            elif resume is not None:
                notices.append(f"{resume} has no checkpoint: the run begins again, and its files are written anew")
            return _guarded(loop, checkpoint, resume, notices)
        finally:
            _close(events, started)


def evaluate_only(
    config: RunConfig, manager: PluginManager, output: Path | None = None, *, rows: PythonRows = NO_ROWS
) -> dict[str, float]:
    """Evaluate the actor on ``eval.data``; see ``training.evaluate``.

    Args:
        output: a file for all trajectories, with their tokens.

    Raises:
        UserError: ``output`` is there already, or could not be read back.
    """
    if output is not None:
        check_output(output)
    data = config.eval.data if config.eval.data.sources else config.data
    tokenizer = load_tokenizer(config.roles["actor"])
    held_out = assemble.tasks_of(config, data, "eval", tokenizer, config.eval.seed, rows, manager)
    with _without_training(config, manager, tokenizer) as (started, events, outcome):
        evaluation = assemble.evaluation_of(config, manager, started, held_out, data)
        metrics, trajectories = events.run(evaluation.run(0))
        manager.each("log_trajectories", step=0, split="eval", trajectories=trajectories)
        if output is not None:
            write_lines(output, [lines(0, "eval", trajectories, provenance(config.model_dump(mode="json"), "eval"))])
        outcome.metrics = metrics
    return metrics


def rollout_only(
    config: RunConfig,
    manager: PluginManager,
    prompts: Sequence[int],
    each: Callable[[int, Collected], None],
    *,
    rows: PythonRows = NO_ROWS,
) -> None:
    """Sample and score as the first steps of a run would under weights that stay.

    Where nothing can judge, as many prompts are drawn and their trajectories are all unjudged.

    Args:
        prompts: per step, how many groups to keep.
        each: told of every step as it finishes.

    Raises:
        KeyboardInterrupt: when asked to stop; the steps that ``each`` was told of are whole.
    """
    tokenizer = load_tokenizer(config.roles["actor"])
    tasks = assemble.tasks_of(config, config.data, "train", tokenizer, config.seed, rows, manager)
    stream = assemble.stream_of(config, manager, tasks)

    async def unjudged(step: int, wanted: int) -> Collected:
        collected = Collected()
        await collector.run(stream.draw(wanted, step), ScoreContext("train", step), collected)
        return collected

    with _without_training(config, manager, tokenizer) as (started, events, outcome):
        collector = assemble.collector_of(config, manager, started)
        judged = collector.judges or not merge_needs(manager).rewards
        if not judged:
            collector.settings = collector.settings.model_copy(update={"max_unjudged": 1.0})
        for step, wanted in enumerate(prompts, start=1):
            context = ScoreContext("train", step, started.handles, tokenizer)
            draw = partial(stream.draw, step=step)
            each(step, events.run(collector.fill(draw, wanted, context) if judged else unjudged(step, wanted)))
            outcome.step = step


def answer_all(
    config: RunConfig,
    manager: PluginManager,
    begin: Callable[[Sequence[Task]], int],
    each: Callable[[int, int, Collected], None],
) -> None:
    """Sample and score answers to every prompt once, in the data's order, a batch of ``train.batch_size`` prompts after the other.

    Args:
        begin: told of all tasks, says how many of the first to leave out.
        each: told of every batch as it finishes: its prompts, all prompts, what was collected.

    Raises:
        KeyboardInterrupt: when asked to stop; the batches that ``each`` was told of are whole.
    """
    tokenizer = load_tokenizer(config.roles["actor"])
    tasks = assemble.tasks_of(config, config.data, "train", tokenizer, config.seed, NO_ROWS, manager).tasks
    if not tasks:
        raise UserError("the data has no prompts that can be counted: give a file or a hub name")
    done, size = begin(tasks), config.train.batch_size
    with _without_training(config, manager, tokenizer) as (started, events, outcome):
        collector = assemble.collector_of(config, manager, started)
        for first in range(done, len(tasks), size):
            draws, collected, step = [Draw(task, 0) for task in tasks[first : first + size]], Collected(), first // size + 1
            events.run(collector.run(draws, ScoreContext("train", step, started.handles, tokenizer), collected))
            each(len(draws), len(tasks), collected)
            outcome.step = step


def generate_only(
    config: RunConfig, tokenizer: Any, prompt_ids: Sequence[Sequence[int]], sampling: Sampling, *, n: int, seed: int
) -> list[list[Generation]]:
    """``n`` completions of each prompt by the run's engine; no plugin takes part."""
    manager = PluginManager([])

    async def answer(engine: Generator) -> list[Generation]:
        engine.expect(n * len(prompt_ids))
        keys = [(ids, (seed, prompt, sample)) for prompt, ids in enumerate(prompt_ids) for sample in range(n)]
        return list(await asyncio.gather(*(engine.generate(ids, sampling, key) for ids, key in keys)))

    with using_roles(config, manager, tokenizer, Needs(roles=(RoleNeed("actor", source=None),))) as (started, events, _):
        assert started.runtime.engine is not None
        answers = events.run(answer(started.runtime.engine))
    return [answers[begin : begin + n] for begin in range(0, len(answers), n)]


def _without_training(config: RunConfig, manager: PluginManager, tokenizer: Any) -> AbstractContextManager[Running]:
    """``using_roles`` with the actor and the plugins' frozen roles."""
    roles = tuple(need for need in merge_needs(manager).roles if not need.trainable and need.name != "actor")
    return using_roles(config, manager, tokenizer, Needs(roles=(RoleNeed("actor", source=None), *roles)))


@contextmanager
def using_roles(config: RunConfig, manager: PluginManager, tokenizer: Any, needs: Needs) -> Iterator[Running]:
    """A runtime with the roles of ``needs`` and an event loop, between ``run_started`` and ``run_finished``. Raises
    ``KeyboardInterrupt`` when the body was interrupted."""
    started = assemble.start_runtime(config, assemble.runtime_start(config, manager, needs, tokenizer, 0, {}))
    with event_loop(config.debug) as events:
        try:
            context = run_context(config, tokenizer, started.handles)
            with run_lifecycle(events, manager, context) as outcome:
                yield started, events, outcome
        finally:
            _close(events, started)
            manager.close()


@contextmanager
def run_lifecycle(events: EventLoop, manager: PluginManager, context: RunContext) -> Iterator[Outcome]:
    """``run_started`` before and ``run_finished`` after, with the outcome that the body fills in. Raises ``KeyboardInterrupt``
    when the body was interrupted."""
    _call_all(events, manager, "run_started", context=context)
    outcome = Outcome("failed", 0)
    try:
        yield outcome
        outcome.status = "finished"
    except Interrupted:
        outcome.status = "interrupted"
        raise KeyboardInterrupt from None
    finally:
        _call_closing(events, manager, outcome)


def _loop(
    config: RunConfig, manager: PluginManager, started: Started, inputs: Inputs, events: EventLoop, run_dir: Path
) -> Loop:
    traits = RunTraits.of(config)
    scoring = assemble.scoring_of(config, manager)
    return Loop(
        config=config,
        manager=manager,
        needs=started.needs,
        runtime=started.runtime,
        handles=started.handles,
        source=assemble.source_of(config, manager, started, inputs, events, traits, scoring),
        evaluate=assemble.evaluate_of(config, manager, started, inputs, events),
        loop=events,
        run_dir=run_dir,
        planned=inputs.steps(config),
        gate=started.gate,
        scoring=scoring,
        in_flight=traits.in_flight(config),
        tokenizer=inputs.tokenizer,
    )


def _guarded(loop: Loop, checkpoint: Checkpoint | None, resume: Path | None, notices: Sequence[str]) -> Outcome:
    """Run the loop between ``run_started`` and ``run_finished``; whatever happens, plugins hear of it."""
    manager, events = loop.manager, loop.loop
    resume_step = checkpoint.step if checkpoint else (-1 if resume else None)
    outcome = Outcome("failed", loop.step, loop.run_dir)
    try:
        context = run_context(loop.config, loop.tokenizer, loop.handles, loop.run_dir, resume_step, loop.steps, notices)
        note_begin(loop.run_dir, loop.steps, checkpoint.step if checkpoint else None)
        _call_all(events, manager, "run_started", context=context)
        loop.sync()
        outcome = loop.run()
        if outcome.status == "finished" and loop.config.checkpoint.final:
            phase("Writing the model")
            save_model(loop.run_dir, partial(loop.runtime.save_role, "actor"))
    except BaseException as error:
        message = str(error) or type(error).__name__
        lost = _is_lost(error)
        if lost:
            loop.close()
        elif isinstance(error, Exception):  # a second Ctrl-C waits for nothing
            loop.rescue()
        if isinstance(error, UserError) and resume is None and loop.run_dir.is_dir():
            remove_start(loop.run_dir)
        begun = isinstance(error, RunError) and loop.step > 0
        known = lost or begun or (isinstance(error, RunError | UserError) and bool(checkpoint_dirs(loop.run_dir)))
        if known:
            blamed = None if isinstance(error, UserError) else checkpoint  # that one says itself what to do
            message = f"{message.rstrip('.')}; {_way_on(loop.run_dir, blamed)}"
        outcome = Outcome("failed", loop.step, loop.run_dir, error=message)
        if isinstance(error, KeyboardInterrupt):
            outcome = Outcome("interrupted", loop.step, loop.run_dir)
            raise KeyboardInterrupt(f"Interrupted after step {loop.step}; {_way_on(loop.run_dir, None)}.") from error
        if known:
            raise (UserError if isinstance(error, UserError) else RunError)(message) from error
        raise
    finally:
        with suppress(OSError):  # as on a full disk, which another error says
            note_end(loop.run_dir, outcome)
        events.run(loop.source.close(), interruptible=False)
        _call_closing(events, manager, outcome)
    return outcome


def _is_lost(error: BaseException | None) -> bool:
    """Whether the run ended because a process or machine is gone."""
    while error is not None and not isinstance(error, LostError):
        error = error.__cause__
    return error is not None


def _way_on(run_dir: Path, begun: Checkpoint | None) -> str:
    """What to do after a failure, and from where that goes on.

    Args:
        begun: what the run went on from.
    """
    saved = checkpoint_dirs(run_dir)
    if not saved:
        return f"no checkpoint was written yet (--checkpoint.every), so {rlhf('train', '--resume', run_dir)} begins again"
    way = f"continue from {saved[-1][1]} with {rlhf('train', '--resume', run_dir)}"
    if begun is not None and begun.path == saved[-1][1] and len(saved) > 1:
        way += f"; if that fails again, remove {begun.path} to continue from {saved[-2][1]}"
    return way


def _close(events: EventLoop, started: Started) -> None:
    """A failure of the runtime is raised unless another error is already on its way."""
    under_way = sys.exc_info()[1]
    try:
        events.run(started.endpoints.close(), interruptible=False)
        events.run(started.runtime.close(), interruptible=False)
    except Exception:
        if under_way is None:
            raise


def _call_closing(events: EventLoop, manager: PluginManager, outcome: Outcome) -> None:
    """``sync_close`` and ``run_finished`` reach every plugin, whatever the others do; the first failure is raised unless
    another error is already on its way."""
    under_way = sys.exc_info()[1]
    first: Exception | None = None
    hooks: dict[str, dict[str, Any]] = {"sync_close": {}, "run_finished": {"outcome": outcome}}
    for hook, arguments in hooks.items():
        for key in manager.names(hook):
            try:
                events.run(manager.acall(key, hook, **arguments), interruptible=False)
            except Exception as error:
                if manager.by_key[key].kind == "tracker":
                    log.warning("%s", error)
                else:
                    first = first or error
    if first is not None and under_way is None:
        raise first


def _call_all(events: EventLoop, manager: PluginManager, hook: str, **arguments: Any) -> None:
    for key in manager.names(hook):
        events.run(manager.acall(key, hook, **arguments), interruptible=False)


def run_context(
    config: RunConfig,
    tokenizer: Any,
    handles: Mapping[str, RoleHandle],
    run_dir: Path | None = None,
    resume_step: int | None = None,
    steps: int | None = None,
    notices: Sequence[str] = (),
) -> RunContext:
    resumed, step = resume_step is not None, resume_step or 0
    return RunContext(config.model_dump(), tokenizer, run_dir, config.seed, handles, resumed, step, steps, tuple(notices))


def _refuse_passed(config: RunConfig, checkpoint: Checkpoint) -> None:
    stream = checkpoint.state["stream"]
    if stream.get("passed") and config.pipeline.max_staleness is None:
        raise UserError(
            "in this run draws passed earlier ones (pipeline.max_staleness), which it would lose now: resume it with"
            f" --async-depth 1 --pipeline.max-staleness {max(2, stream['max_age'])}"
        )


def _refuse_finished(config: RunConfig, checkpoint: Checkpoint, run_dir: Path, inputs: Inputs) -> None:
    saved = "trajectories" in checkpoint.state["stream"]
    if saved != (inputs.saved is not None):
        then, now = ("from saved trajectories", "sampling") if saved else ("sampling", "from saved trajectories")
        raise UserError(
            f"{run_dir} was trained {then}, and cannot continue {now}: start a new run with --actor.model {run_dir}/model"
        )
    if checkpoint.state["pending"] is not None or (config.checkpoint.final and not model_written(run_dir, checkpoint)):
        return
    if inputs.saved is not None and checkpoint.step >= inputs.saved.steps:
        raise UserError(f"{run_dir} is finished at step {checkpoint.step}: {inputs.saved.path} has no more steps")
    if (reason := checkpoint.state.get("stopped")) is not None:
        raise UserError(
            f"{run_dir} was stopped after step {checkpoint.step} by {reason}; to train further, start a new run with"
            f" --actor.model {checkpoint.role('actor')}"
        )
    if checkpoint.step >= inputs.steps(config):
        more = "--train.steps" if config.train.steps is not None or inputs.units is None else "--data.epochs"
        raise UserError(f"{run_dir} is finished at step {checkpoint.step}; raise {more} to continue")
