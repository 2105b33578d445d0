"""A run from its configuration to its outcome: what is checked, made, resumed and written, in order."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from rlhf_host.allocator import keep_freed_memory
from rlhf_host.config.plan import PROTOCOLS, merge_needs
from rlhf_host.config.schema import DataConfig, EvalConfig, RolloutConfig, RunConfig
from rlhf_host.config.yaml_file import save_config
from rlhf_host.data.sources import NO_ROWS, GivenRows, TaskSet, TaskStream, load_tasks
from rlhf_host.errors import LostError, RunError, UserError
from rlhf_host.models.loading import load_tokenizer, vocabulary_size
from rlhf_host.plugins import requirements
from rlhf_host.plugins.manager import Loaded, PluginManager
from rlhf_host.plugins.selection import PYTHON, build, find
from rlhf_host.records.episodes import Sampling
from rlhf_host.records.needs import Needs, Outcome, RoleHandle, RoleNeed, RunContext, ScoreContext
from rlhf_host.rollouts.collect import Collected, Collector, Draw
from rlhf_host.rollouts.episodes import Episodes
from rlhf_host.training.checkpoints import (
    Checkpoint,
    checkpoint_dirs,
    keep_checkpoints,
    load_checkpoint,
    plain_state,
    save_checkpoint,
    write_directory,
)
from rlhf_host.training.evaluate import Evaluation
from rlhf_host.training.events import EventLoop, Interrupted, event_loop
from rlhf_host.training.online import OnlineLoop
from rlhf_host.training.records import write_whole
from rlhf_host.training.runtime import Runtime
from rlhf_host.training.trajectories import SavedRollouts, check_vocabulary


@dataclass(slots=True)
class Inputs:
    """What is read before anything is written."""

    tokenizer: Any
    tasks: TaskSet | SavedRollouts
    held_out: TaskSet | None

    @property
    def notices(self) -> list[str]:
        held_out = [f"held out: {line}" for line in self.held_out.report] if self.held_out else []
        return [*self.tasks.report, *held_out]


def train(config: RunConfig, manager: PluginManager, *, resume: Path | None = None, rows: GivenRows = NO_ROWS) -> Outcome:
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
    _set_up_process(config)
    inputs = _read(config, rows)
    checkpoint = load_checkpoint(resume) if resume else None
    if checkpoint is not None:
        _refuse_finished(config, checkpoint, run_dir, inputs)
    needs = merge_needs(manager)
    runtime = _runtime(config)
    updates = config.train.steps * config.train.epochs * config.train.minibatches
    models = {} if checkpoint is None else {need.name: checkpoint.role(need.name) for need in needs.roles if need.trainable}
    runtime.start(config=config, manager=manager, needs=needs, tokenizer=inputs.tokenizer, total_updates=updates, models=models)
    _write_start(config, manager, run_dir)
    with event_loop(config.debug) as events:
        runtime.compute_with(events.execute)
        try:
            loop = _online(config, manager, needs, runtime, inputs, events, run_dir)
            if checkpoint is not None:
                _restore(loop, checkpoint)
            outcome = _guarded(loop, checkpoint, resume, inputs.notices)
        finally:
            events.run(runtime.close(), interruptible=False)
            manager.close()
    return outcome


def evaluate_only(config: RunConfig, manager: PluginManager, *, rows: GivenRows = NO_ROWS) -> dict[str, float]:
    """Evaluate the actor on ``eval.data``; see ``training.evaluate``."""
    data = config.eval.data if config.eval.data.sources else config.data
    tokenizer = load_tokenizer(config.roles["actor"])
    held_out = _tasks(config, data, "eval", tokenizer, config.eval.seed, rows)
    with _without_training(config, manager, tokenizer) as (runtime, events, outcome):
        evaluation = _evaluation(config, manager, runtime, tokenizer, held_out, data)
        metrics, trajectories = events.run(evaluation.run(0))
        for key in manager.names("log_trajectories"):
            manager.call(key, "log_trajectories", step=0, split="eval", trajectories=trajectories)
        outcome.metrics = metrics
    return metrics


def rollout_only(
    config: RunConfig,
    manager: PluginManager,
    prompts: Sequence[int],
    each: Callable[[int, Collected], None],
    *,
    rows: GivenRows = NO_ROWS,
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
    tasks = _tasks(config, config.data, "train", tokenizer, config.seed, rows)
    stream = TaskStream(tasks, config.seed, config.data.shuffle)

    def draw() -> Draw:
        task = stream.next()
        return Draw(task, stream.epoch)

    async def unjudged(step: int, wanted: int) -> Collected:
        collected = Collected()
        await collector.run([draw() for _ in range(wanted)], ScoreContext("train", step), collected)
        order = {f"train-{step}-{number}": number for number in range(wanted)}
        collected.spoiled.sort(key=lambda row: (order[row.group_id], row.sample))
        return collected

    with _without_training(config, manager, tokenizer) as (runtime, events, outcome):
        collector = _collector(config, manager, runtime, tokenizer)
        judged = collector.judges or config.agent.plugin != RunConfig().agent.plugin
        if not judged:
            collector.settings = collector.settings.model_copy(update={"max_unjudged": 1.0})
        for step, wanted in enumerate(prompts, start=1):
            context = ScoreContext("train", step, runtime.handles, tokenizer)
            each(step, events.run(collector.fill(draw, wanted, context) if judged else unjudged(step, wanted)))
            outcome.step = step


@contextmanager
def _without_training(
    config: RunConfig, manager: PluginManager, tokenizer: Any
) -> Iterator[tuple[Runtime, EventLoop, Outcome]]:
    """The actor and the plugins' frozen roles, between ``run_started`` and ``run_finished``.

    Raises:
        KeyboardInterrupt: when the body was interrupted.
    """
    _set_up_process(config)
    roles = tuple(need for need in merge_needs(manager).roles if not need.trainable and need.name != "actor")
    needs = Needs(roles=(RoleNeed("actor", source=None), *roles))
    with using_roles(config, manager, tokenizer, needs) as used:
        yield used


@contextmanager
def using_roles(
    config: RunConfig, manager: PluginManager, tokenizer: Any, needs: Needs
) -> Iterator[tuple[Runtime, EventLoop, Outcome]]:
    """A runtime with the roles of ``needs`` and an event loop, between ``run_started`` and ``run_finished``.

    Raises:
        KeyboardInterrupt: when the body was interrupted.
    """
    runtime = _runtime(config)
    runtime.start(config=config, manager=manager, needs=needs, tokenizer=tokenizer, total_updates=0, models={})
    with event_loop(config.debug) as events:
        runtime.compute_with(events.execute)
        try:
            context = run_context(config, tokenizer, None, runtime.handles, resume_step=None)
            with told(events, manager, context) as outcome:
                yield runtime, events, outcome
        finally:
            events.run(runtime.close(), interruptible=False)
            manager.close()


@contextmanager
def told(events: EventLoop, manager: PluginManager, context: RunContext) -> Iterator[Outcome]:
    """``run_started`` before and ``run_finished`` after, with the outcome that the body fills in.

    Raises:
        KeyboardInterrupt: when the body was interrupted.
    """
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


# --- before the run -----------------------------------------------------------------------------


def _set_up_process(config: RunConfig) -> None:
    keep_freed_memory()
    if config.train.threads:
        torch.set_num_threads(config.train.threads)


def _read(config: RunConfig, rows: GivenRows) -> Inputs:
    tokenizer = load_tokenizer(config.roles["actor"])
    if config.from_trajectories is not None:
        saved = SavedRollouts(config)
        check_vocabulary(saved.saved, vocabulary_size(config.roles["actor"]))
        return Inputs(tokenizer, saved, None)
    tasks = _tasks(config, config.data, "train", tokenizer, config.seed, rows)
    held_out = None
    if config.eval.data.sources:
        held_out = _tasks(config, config.eval.data, "eval", tokenizer, config.eval.seed, rows)
    return Inputs(tokenizer, tasks, held_out)


def _tasks(
    config: RunConfig, data: DataConfig, split: Literal["train", "eval"], tokenizer: Any, seed: int, rows: GivenRows
) -> TaskSet:
    room = None if config.rollout.max_tokens is None else config.rollout.max_tokens - 1
    return load_tasks(data, split=split, tokenizer=tokenizer, seed=seed, max_prompt_tokens=room, given=rows)


def _runtime(config: RunConfig) -> Runtime:
    runtime: Any = build(find("runtime", config.runtime.plugin), config.runtime.options)
    return runtime


def _write_start(config: RunConfig, manager: PluginManager, run_dir: Path) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    save_config(config, run_dir / "config.yaml")
    plugins = [_plugin_entry(item) for item in manager.loaded]
    aside = run_dir / ".plugins.json.partial"
    aside.write_text(json.dumps(plugins, indent=1) + "\n")
    aside.replace(run_dir / "plugins.json")
    write_whole(run_dir / requirements.FILE, _requirements(config, manager).encode())


def _requirements(config: RunConfig, manager: PluginManager) -> str:
    """Exact versions of what the run stands on."""
    plugins = [item.info for item in manager.loaded]
    plugins += [find(kind, getattr(config, kind).plugin) for kind in PROTOCOLS]
    used = {info.name for info in plugins} | sys.modules.keys()
    extras = [extra for extra in requirements.extras_of_host() if extra in used]
    return requirements.pinned([info.distribution for info in plugins], extras)


def _plugin_entry(item: Loaded) -> dict[str, Any]:
    """What reproducing the run needs to know: an installed plugin's distribution, or where a Python object was defined."""
    given = item.info.distribution == PYTHON
    installed = {"distribution": item.info.distribution, "version": item.info.version}
    source = {"distribution": None, "version": None, "object": item.info.value} if given else installed
    return {"kind": item.kind, "alias": item.alias, "name": item.info.name, **source, "weight": item.weight}


def _online(
    config: RunConfig,
    manager: PluginManager,
    needs: Needs,
    runtime: Runtime,
    inputs: Inputs,
    events: EventLoop,
    run_dir: Path,
) -> OnlineLoop:
    stream: TaskStream | SavedRollouts
    collector: Collector | SavedRollouts
    if isinstance(inputs.tasks, SavedRollouts):
        stream = collector = inputs.tasks
        weights = inputs.tasks.weights
    else:
        stream = TaskStream(inputs.tasks, config.seed, config.data.shuffle)
        collector = _collector(config, manager, runtime, inputs.tokenizer)
        weights = {alias: weight for alias, (_, weight) in collector.judges.items()}
    evaluation = None
    if inputs.held_out is not None:
        evaluation = _evaluation(config, manager, runtime, inputs.tokenizer, inputs.held_out, config.eval.data)
    return OnlineLoop(
        config=config,
        manager=manager,
        needs=needs,
        runtime=runtime,
        stream=stream,
        collector=collector,
        evaluation=evaluation,
        loop=events,
        run_dir=run_dir,
        weights=weights,
        save=_save,
        tokenizer=inputs.tokenizer,
    )


def _collector(config: RunConfig, manager: PluginManager, runtime: Runtime, tokenizer: Any) -> Collector:
    rollout = config.rollout
    sampling = _sampling(rollout, rollout)
    episodes = _episodes(manager, runtime, tokenizer, config.data, sampling, rollout)
    return Collector(episodes, manager, rollout, n=rollout.n, seed=config.seed, split="train")


def _evaluation(
    config: RunConfig, manager: PluginManager, runtime: Runtime, tokenizer: Any, held_out: TaskSet, data: DataConfig
) -> Evaluation:
    settings, rollout = config.eval, config.rollout
    sampling = _sampling(settings, rollout)
    episodes = _episodes(manager, runtime, tokenizer, data, sampling, rollout)
    collector = Collector(episodes, manager, rollout, n=settings.n, seed=settings.seed, split="eval")
    return Evaluation(held_out.tasks, collector, settings, runtime.handles, tokenizer)


def _sampling(drawn: RolloutConfig | EvalConfig, rollout: RolloutConfig) -> Sampling:
    return Sampling(
        max_new_tokens=drawn.max_new_tokens or rollout.max_new_tokens,
        temperature=drawn.temperature,
        top_p=drawn.top_p,
        top_k=drawn.top_k,
        min_p=drawn.min_p,
        stop=tuple(rollout.stop),
        stop_token_ids=tuple(rollout.stop_token_ids),
    )


def _episodes(
    manager: PluginManager, runtime: Runtime, tokenizer: Any, data: DataConfig, sampling: Sampling, rollout: RolloutConfig
) -> Episodes:
    longest = min(rollout.max_tokens or runtime.context_length, runtime.context_length)
    return Episodes(manager, runtime.engine, tokenizer, data, sampling, longest, rollout.episode_retries)


# --- the run ------------------------------------------------------------------------------------


def _guarded(loop: OnlineLoop, checkpoint: Checkpoint | None, resume: Path | None, notices: Sequence[str]) -> Outcome:
    """Run the loop between ``run_started`` and ``run_finished``; whatever happens, plugins hear of it."""
    manager, events = loop.manager, loop.loop
    resume_step = checkpoint.step if checkpoint else (-1 if resume else None)
    outcome = Outcome("failed", loop.step, loop.run_dir)
    try:
        context = run_context(loop.config, loop.tokenizer, loop.run_dir, loop.runtime.handles, resume_step, notices)
        _call_all(events, manager, "run_started", context=context)
        _call_all(events, manager, "sync_connect", targets=loop.runtime.targets)
        loop._sync()
        with rare_collection():
            outcome = loop.run()
        if outcome.status == "finished" and loop.config.checkpoint.final:
            write_directory(loop.run_dir / "model", lambda path: loop.runtime.save_role("actor", path))
    except BaseException as error:
        said = str(error) or type(error).__name__
        lost = _is_lost(error)
        if lost:
            said = f"{said.rstrip('.')}; {_way_on(loop.run_dir)}"
        outcome = Outcome("failed", loop.step, loop.run_dir, error=said)
        if lost:
            raise RunError(said) from error
        raise
    finally:
        _call_closing(events, manager, outcome)
    return outcome


@contextmanager
def rare_collection() -> Iterator[None]:
    """Look for reference cycles after 100,000 new objects instead of 700, and leave out what is there already.

    A step makes thousands of objects that all go at its end, and torch and transformers have hundreds of thousands that stay:
    walking through them again and again would double a rollout's time.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def _is_lost(error: BaseException | None) -> bool:
    """Whether the run ended because a process or machine is gone."""
    while error is not None and not isinstance(error, LostError):
        error = error.__cause__
    return error is not None


def _way_on(run_dir: Path) -> str:
    """What to do after a loss, and from where that goes on."""
    saved = checkpoint_dirs(run_dir)
    if not saved:
        return f"no checkpoint was written yet (--checkpoint.every), so rlhf train --resume {run_dir} begins again"
    return f"go on from {saved[-1][1]} with rlhf train --resume {run_dir}"


def _call_closing(events: EventLoop, manager: PluginManager, outcome: Outcome) -> None:
    """``sync_close`` and ``run_finished`` reach every plugin, whatever the others do; the first failure is raised unless
    another error is already on its way."""
    under_way = sys.exc_info()[1]
    first: Exception | None = None
    for hook, arguments in (("sync_close", {}), ("run_finished", {"outcome": outcome})):
        for key in manager.names(hook):
            try:
                events.run(manager.acall(key, hook, **arguments), interruptible=False)
            except Exception as error:
                first = first or error
    if first is not None and under_way is None:
        raise first


def _call_all(events: EventLoop, manager: PluginManager, hook: str, **arguments: Any) -> None:
    for key in manager.names(hook):
        events.run(manager.acall(key, hook, **arguments), interruptible=False)


def run_context(
    config: RunConfig,
    tokenizer: Any,
    run_dir: Path | None,
    handles: Mapping[str, RoleHandle],
    resume_step: int | None,
    notices: Sequence[str] = (),
) -> RunContext:
    return RunContext(
        config=config.model_dump(),
        tokenizer=tokenizer,
        run_dir=run_dir,
        seed=config.seed,
        roles=handles,
        resumed=resume_step is not None,
        resume_step=resume_step or 0,
        notices=tuple(notices),
    )


# --- checkpoints --------------------------------------------------------------------------------


def _save(loop: OnlineLoop) -> None:
    runtime, manager = loop.runtime, loop.manager
    plugins = {key: plain_state(state, key) for key, state in manager.each("state_dict")}
    tensors = {"plugins": plugins, "torch_rng": torch.get_rng_state()}

    def saver(name: str) -> Any:
        return lambda directory: runtime.save_role(name, directory)

    savers = {name: saver(name) for name in runtime.trainable}
    save_checkpoint(loop.run_dir, loop.step, loop.state_dict(), tensors, savers, runtime.save_state)
    best = loop.best["step"] if loop.best else None
    keep_checkpoints(loop.run_dir, loop.config.checkpoint.keep, best)


def _refuse_finished(config: RunConfig, checkpoint: Checkpoint, run_dir: Path, inputs: Inputs) -> None:
    saved = "trajectories" in checkpoint.state["stream"]
    if saved != isinstance(inputs.tasks, SavedRollouts):
        then, now = ("from saved trajectories", "sampling") if saved else ("sampling", "from saved trajectories")
        raise UserError(
            f"{run_dir} was trained {then}, and cannot go on {now}: begin a new run with --actor.model {run_dir}/model"
        )
    if isinstance(inputs.tasks, SavedRollouts) and checkpoint.step >= inputs.tasks.steps:
        raise UserError(f"{run_dir} is finished at step {checkpoint.step}: {inputs.tasks.path} has no more steps")
    done = checkpoint.step >= config.train.steps and checkpoint.state["pending"] is None
    if done and ((run_dir / "model").exists() or not config.checkpoint.final):
        raise UserError(f"{run_dir} is finished at step {checkpoint.step}; raise --train.steps to go on")


def _restore(loop: OnlineLoop, checkpoint: Checkpoint) -> None:
    loop.load_state_dict(checkpoint.step, checkpoint.state)
    loop.runtime.load_state(checkpoint.optimizers)
    torch.set_rng_state(checkpoint.tensors["torch_rng"])
    _restore_plugins(loop.manager, checkpoint.tensors["plugins"])


def _restore_plugins(manager: PluginManager, states: Mapping[str, Any]) -> None:
    for key, state in states.items():
        if key in manager.names("load_state_dict"):
            manager.call(key, "load_state_dict", state=state)
