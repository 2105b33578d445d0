"""``rlhf train --dry-run``: look at everything a run would touch, and touch nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import click

from rlhf_host.config.defaults import KINDS, RunTraits, kernels_to_try, plugin_spec
from rlhf_host.config.resolve import merge_needs
from rlhf_host.config.schema import RunConfig
from rlhf_host.data.sources import NO_ROWS
from rlhf_host.errors import UserError, blaming
from rlhf_host.plugins.discovery import unchosen
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.plugins.selection import find_data, imported
from rlhf_host.protocols.data import GivenData, PythonRows
from rlhf_host.records.needs import AlgoNeeds, Needs, RoleNeed

ROWS = 8
"""Rows read of each data source."""


def dry_run(config: RunConfig, manager: PluginManager, resume: Path | None = None, *, rows: PythonRows = NO_ROWS) -> None:
    """Say what the run would be; models, tokenizers and the first rows of data are looked at.

    Args:
        resume: the run that it would continue.
        rows: data given in Python.

    Raises:
        UserError: something the run needs is missing or malformed, or would be refused later.
    """
    from rlhf_host.models.loading import load_tokenizer
    from rlhf_host.training import disk
    from rlhf_host.training.assemble import runtime_plugin, runtime_start
    from rlhf_host.training.inputs import STEPS
    from rlhf_host.training.rehearsal import check_inputs, rehearse
    from rlhf_host.training.resuming import with_saved_models

    needs = merge_needs(manager)
    config = config if resume is None else with_saved_models(config, needs, resume)
    idle = () if needs.samples else ("agent", "sync", "engine")
    for item in (item for item in manager.loaded if item.kind not in idle):
        weight = f", weight {item.weight:g}" if item.kind == "reward" else ""
        click.echo(f"{item.key}: {item.info.source}{weight}")
    for key in (key for key in (*KINDS, "sync") if key not in idle):
        info = plugin_spec(config, key).info
        click.echo(f"{info.kind}:{info.name}: {info.source}")
    for spec in kernels_to_try(config.kernels):
        click.echo(f"kernels:{spec.name}: {spec.info.source}, tried at the start")
    for need in needs.roles:
        click.echo(f"role {need.name}: {_model(need, config, needs)}")
    tokenizer = load_tokenizer(config.roles["actor"])
    check_inputs(config, manager, needs, tokenizer)
    saved = find_data(config, needs).read(config, manager, needs, tokenizer, rows) if config.from_trajectories else None
    models = _resumed(resume, config, needs, saved) if resume is not None else {}
    start = runtime_start(config, manager, needs, tokenizer, 1, models)
    for line in [*runtime_plugin(config).describe(start)]:
        click.echo(f"runtime {config.runtime.name}: {line}")
    lines, outlines = rehearse(start, remote=RunTraits.of(config).runtime.remote)
    for line in [
        *lines,
        *disk.told(config, start, outlines, Path(str(config.run_dir)), config.train.steps or STEPS),
        *told("forecast", config, manager),
        *(saved.report if saved is not None else ()),
    ]:
        click.echo(line)
    for split in ("train", "eval") if saved is None else ():
        for line in _data(config, split, tokenizer, needs, manager, rows):
            click.echo(f"{split} data: {line}")
    train, rollout = config.train, config.rollout
    if needs.samples:
        click.echo(
            f"{train.steps or STEPS} steps of {train.batch_size} prompts × {rollout.n} samples, updates per step:"
            f" {train.updates_per_batch}, old log-probabilities {config.old_logprobs_mode}"
        )
    else:
        click.echo(find_data(config, needs).length(config))
    click.echo("Checked: settings, plugins, the configuration of every model, the tokenizer, and data as far as it says above.")
    click.echo("Not checked: weights, other machines, rewards and trackers at work, and memory beyond what is said above.")
    click.echo(f"The run would be written to {config.run_dir}.")


def _resumed(run_dir: Path, config: RunConfig, needs: Needs, saved: GivenData | None) -> dict[str, Path]:
    """The models of the checkpoint with which the run would go on. Raises ``UserError`` where it could not."""
    from rlhf_host.config.run_dir import in_use
    from rlhf_host.training.checkpoints import load_checkpoint
    from rlhf_host.training.inputs import RAISE_STEPS, STEPS
    from rlhf_host.training.resuming import refuse_finished, refuse_foreign, refuse_lost
    from rlhf_host.training.trained_roles import models_of

    if in_use(run_dir):
        raise UserError(f"{run_dir} is in use by another process: wait for it or stop it")
    if (checkpoint := load_checkpoint(run_dir)) is None:
        click.echo(f"{run_dir} has no checkpoint: the run would begin again")
        return {}
    refuse_foreign(checkpoint)
    click.echo(f"{checkpoint.path}: the run would go on after step {checkpoint.step}")
    end: tuple[int | None, str] = config.train.steps or (STEPS if needs.samples else None), RAISE_STEPS
    refuse_finished(config, checkpoint, run_dir, end if saved is None else saved.end(config))
    refuse_lost(config, needs, checkpoint)
    return models_of(needs, checkpoint.role)


def _model(need: RoleNeed, config: RunConfig, needs: Needs) -> str:
    """The role's model, looked for, and what is trained of it."""
    from rlhf_host.models.locations import find_model
    from rlhf_host.training.role_settings import role_settings

    settings = role_settings(config.roles, need, None, needs)
    find_model(settings.model)
    adapter = f" with the adapter {settings.adapter}" if settings.adapter else ""
    trained = "frozen"
    if need.follows is not None:
        trained = f"the weights of {need.source}" if need.follows.live else f"follows {need.source}"
    if need.trainable:
        new = f"a new adapter of rank {settings.lora.rank} is trained" if settings.lora.rank else "trainable"
        trained = "its adapter is trained" if adapter else new
    narrow = f", quantized ({settings.quantize})" if settings.quantize else ""
    return f"{settings.model}{adapter}{narrow}, {need.head} head, {trained}"


def _data(config: RunConfig, split: Any, tokenizer: Any, needs: Needs, manager: PluginManager, rows: PythonRows) -> list[str]:
    """Returns what the first rows of every source that is at hand look like."""
    from rlhf_host.data.sources import load_tasks
    from rlhf_host.training.batching import refuse_large_answers
    from rlhf_host.training.inputs import prompt_limit, refuse_other_agents

    lines = []
    data, seed = (config.data, config.seed) if split == "train" else (config.eval.data, config.eval.seed)
    room = prompt_limit(config)
    longest = min((limit for limit in (room, data.max_prompt_tokens) if limit is not None), default=None)
    for source in data.sources:
        if _is_hub_name(source.path):
            lines.append(f"{source.path}: a hub dataset, not checked")
            continue
        few = source.model_copy(update={"max_samples": min(source.max_samples or ROWS, ROWS)})
        part = data.model_copy(update={"sources": [few], "max_samples": None, "max_prompt_tokens": None})
        if not needs.samples:
            report = find_data(config, needs).look(config, part, split, needs, tokenizer, rows)
            lines += [f"{line}; later rows are not checked" for line in report]
            continue
        whole = part.model_copy(update={"sources": [source], "max_samples": data.max_samples})
        tasks = load_tasks(whole, rows=rows, split=split, tokenizer=tokenizer, seed=seed, manager=manager, first=ROWS)
        lines += [f"{line}; later rows are not checked" for line in tasks.report]
        refuse_other_agents(tasks, data, manager)
        if AlgoNeeds.of(needs).unit_rows and split == "train":
            prompt = max((len(task.prompt_ids or ()) for task in tasks.tasks), default=1)
            lines += filter(None, [refuse_large_answers(config, None if room is None else room + 1, prompt)])
        if longest is not None and (long := sum(len(task.prompt_ids or ()) > longest for task in tasks.tasks)):
            what = "cut" if data.long_prompts == "truncate" else "left out"
            lines.append(f"{source.path}: {long} of these are {what}: prompt longer than {longest} tokens")
    return lines


def _is_hub_name(path: str) -> bool:
    from rlhf_host.data.rows import looks_like_a_file
    from rlhf_host.plugins.discovery import discover

    plugin = path.rpartition(":")[2] in {info.name for info in discover() if info.kind == "tasks"}
    return not plugin and "/" in path and not Path(path).expanduser().exists() and not looks_like_a_file(path)


def told(kind: Literal["forecast", "afterword"], *given: Any) -> Iterator[str]:
    """Yields what packages say of a run: forecasts in a dry run, afterwords when it has ended. Raises ``UserError`` for a run that
    would fail, ``RunError`` for a package that does.

    A package takes part with an entry point in the group ``rlhf.forecasts``, a callable that takes the run's ``RunConfig`` and its
    ``PluginManager``, or in ``rlhf.afterwords``, one that takes the ``RunConfig``; it returns lines. A forecast raises
    ``UserError`` for a run that would fail.
    """
    for info in unchosen(kind):
        with blaming(str(info), "its call"):
            said = imported(info)(*given)
            lines = list(said)
            if isinstance(said, str) or not all(isinstance(line, str) for line in lines):
                raise TypeError("it must return lines, a list of texts")
        yield from lines
