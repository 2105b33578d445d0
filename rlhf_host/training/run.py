"""A run from its configuration to its outcome: what is checked, started, resumed and written, in order."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from rlhf_host.config.defaults import RunTraits
from rlhf_host.config.resolve import merge_needs
from rlhf_host.config.run_dir import CONFIG, checkpoint_dirs, locked, written
from rlhf_host.config.schema import RunConfig
from rlhf_host.data.sources import NO_ROWS
from rlhf_host.errors import RunError, UserError
from rlhf_host.garbage import frozen
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.protocols.data import PythonRows
from rlhf_host.records.needs import Outcome
from rlhf_host.training import assemble, disk
from rlhf_host.training.assemble import Started
from rlhf_host.training.checkpoints import Checkpoint, link_model, load_checkpoint, take_back_replaced
from rlhf_host.training.components import Progress, RunComponents
from rlhf_host.training.events import EventLoop, event_loop
from rlhf_host.training.failures import explained, is_lost, message_of
from rlhf_host.training.inputs import Inputs, read_inputs
from rlhf_host.training.keeper import CheckpointKeeper
from rlhf_host.training.ledger import Ledger
from rlhf_host.training.lifecycle import call_all, call_closing, close, run_context
from rlhf_host.training.loop import Loop
from rlhf_host.training.rehearsal import rehearse
from rlhf_host.training.resuming import refuse_finished, refuse_foreign, refuse_lost, with_saved_models
from rlhf_host.training.run_files import note_begin, note_end, remove_start, write_start
from rlhf_host.training.trained_roles import models_of

log = logging.getLogger(__name__)


def train(
    config: RunConfig, manager: PluginManager, *, resume: Path | None = None, rows: PythonRows = NO_ROWS, restarts: int = 0
) -> Outcome:
    """Train as configured; the run directory is ``config.run_dir``.

    Args:
        config: with ``run_dir`` set.
        manager: the selected plugins.
        resume: the run directory whose newest checkpoint is taken up; without a checkpoint the run starts over in it.
        rows: data given in Python.
        restarts: how often it begins again in this process after one of the others is lost.

    Raises:
        UserError: for input that cannot be used. What was written before the first step is removed then, unless the directory
            had files of others.
        RunError: when the run had to stop.
    """
    if config.run_dir is None:
        raise UserError("the run has no run_dir")
    run_dir = Path(config.run_dir)
    with locked(run_dir):
        if resume is None and (run_dir / CONFIG).exists():
            raise UserError(f"another run was begun in {run_dir} meanwhile: choose another --run-dir")
        fresh = resume is None and not written(run_dir)
        needs = merge_needs(manager)
        inputs = read_inputs(with_saved_models(config, needs, resume) if resume else config, rows, manager, needs)
        left = restarts
        while True:
            try:
                with started_run(config, manager, inputs, run_dir, resume) as (loop, started, checkpoint, notices):
                    return _run(loop, started, checkpoint, resume, notices, fresh)
            except RunError as error:
                if not (left and is_lost(error) and checkpoint_dirs(run_dir)):
                    raise
                left, resume = left - 1, run_dir
                log.error("%s. Restarting from it (%d of %d)", error, restarts - left, restarts)


@contextmanager
def started_run(
    config: RunConfig, manager: PluginManager, inputs: Inputs, run_dir: Path, resume: Path | None
) -> Iterator[tuple[Loop, Started, Checkpoint | None, Sequence[str]]]:
    """Starts everything, and closes everything in the end."""
    needs, data = merge_needs(manager), inputs.data
    if resume:
        take_back_replaced(resume)
    checkpoint = load_checkpoint(resume) if resume else None
    if checkpoint is not None:
        refuse_foreign(checkpoint)
        refuse_finished(config, checkpoint, run_dir, data.end(config))
        refuse_lost(config, needs, checkpoint)
    updates = data.steps(config) * config.train.updates_per_batch
    models = models_of(needs, checkpoint.role) if checkpoint else {}
    computed = data.computed(inputs.config, manager, needs)
    loaded = replace(needs, roles=tuple(need for need in needs.roles if need.name not in computed))
    start = assemble.runtime_start(inputs.config, manager, loaded, inputs.tokenizer, updates, models)
    traits = RunTraits.of(config)
    if (pictured := data.pictured) and start.engine is not None and not traits.engine.images:
        raise UserError(f"engine {config.engine.name} takes no prompts with pictures: choose another --engine")
    _, outlines = rehearse(start, remote=traits.runtime.remote, pictured=pictured)
    notices = [*data.report, *disk.told(config, start, outlines, run_dir, data.steps(config))]
    del outlines
    started = assemble.start_runtime(inputs.config, start)
    with event_loop(config.debug) as events:
        try:
            loop = _loop(config, manager, started, inputs, events, run_dir)
            if checkpoint is not None:
                loop.keeper.restore(checkpoint)
            elif resume is not None:
                notices.append(f"{resume} has no checkpoint: the run begins again, and its files are written anew")
            write_start(config, manager, run_dir, checkpoint.step if checkpoint else 0)
            with frozen():
                yield loop, started, checkpoint, notices
        finally:
            close(events, started)


def _loop(
    config: RunConfig, manager: PluginManager, started: Started, inputs: Inputs, events: EventLoop, run_dir: Path
) -> Loop:
    data = inputs.data
    parts = RunComponents(
        config=config,
        manager=manager,
        needs=started.needs,
        runtime=started.runtime,
        bring=started.bring,
        source=data.source(inputs.config, manager, started, events),
        events=events,
        run_dir=run_dir,
        progress=Progress(),
        ledger=Ledger(run_dir),
    )
    return Loop(
        parts,
        CheckpointKeeper(parts, started.scoring),
        evaluate=data.evaluate(inputs.config, manager, started, events),
        planned=data.steps(config),
        gate=started.gate,
        in_flight=started.traits.in_flight(config),
    )


def _run(
    loop: Loop, started: Started, checkpoint: Checkpoint | None, resume: Path | None, notices: Sequence[str], fresh: bool
) -> Outcome:
    """Runs the loop between ``run_started`` and ``run_finished``; whatever happens, plugins hear of it.

    Args:
        fresh: the run directory was empty.
    """
    run_dir, progress = loop.parts.run_dir, loop.parts.progress
    outcome = Outcome("failed", progress.step, run_dir)
    begun = refused = False
    try:
        begin_run(loop, started, checkpoint, resume, notices)
        begun = True
        outcome = loop.run()
        if outcome.status == "finished" and loop.parts.config.checkpoint.final:
            link_model(run_dir, progress.step)
    except BaseException as error:
        refused = isinstance(error, UserError) and resume is None
        _rescue(loop, error)
        told = explained(error, run_dir, progress.step, checkpoint)
        failed = replace(outcome, step=progress.step, error=message_of(told))
        outcome = Outcome("interrupted", progress.step, run_dir) if isinstance(error, KeyboardInterrupt) else failed
        if told is error:
            raise
        raise told from error
    finally:
        try:
            end_run(loop, outcome)
        finally:
            if refused and run_dir.is_dir():
                remove_start(run_dir, everything=fresh and not begun)
    return outcome


def begin_run(loop: Loop, started: Started, checkpoint: Checkpoint | None, resume: Path | None, notices: Sequence[str]) -> None:
    """Tells plugins that the run begins, and brings the first weights to the engines."""
    parts, step = loop.parts, checkpoint.step if checkpoint else None
    before = step if step is not None else (-1 if resume else None)
    context = run_context(parts.config, started.tokenizer, started.handles, parts.run_dir, before, loop.steps, notices)
    context.processes = parts.processes
    rates = {need.name: started.roles[need.name].peak_lr for need in started.needs.roles if need.trainable}
    note_begin(parts.run_dir, loop.steps, step, rates, getattr(parts.runtime, "about", {}))
    call_all(parts.events, parts.manager, "run_started", context=context)
    parts.events.run(loop.sync(), interruptible=False)


def _rescue(loop: Loop, error: BaseException) -> None:
    """Writes a checkpoint of the last finished step, if processes are left and nobody waits for the end."""
    if is_lost(error):
        loop.keeper.close()
    elif isinstance(error, Exception):
        loop.keeper.rescue()
    else:  # a second Ctrl-C waits for nothing
        loop.keeper.abandon()


def end_run(loop: Loop, outcome: Outcome) -> None:
    parts = loop.parts
    with suppress(OSError):  # as on a full disk, which another error says
        note_end(parts.run_dir, outcome)
    if parts.source.pipeline is not None:
        parts.events.run(parts.source.pipeline.close(), interruptible=False)
    call_closing(parts.events, parts.manager, outcome)
