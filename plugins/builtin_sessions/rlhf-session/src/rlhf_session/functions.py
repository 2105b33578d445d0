"""``trainable_session``, with the arguments of ``rlhf_host.train``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, Any

from rlhf_host import Scratch, Task, UserError
from rlhf_host.batches import TaskSet
from rlhf_host.internals import Inputs, PluginManager, check_inputs, load_tokenizer, locked, read_inputs
from rlhf_host.sampling import Arguments, configured, in_arguments, speaking
from rlhf_host.settings import TrainConfig, check, merge_needs

if TYPE_CHECKING:
    from rlhf_host.settings import RunConfig
    from rlhf_session.session import TrainableSession


SPLIT = "split the batch, batch.select(rows), and take a step for each part, with train.old_logprobs='recompute' or 'sampler'"
REFUSED = {
    "epochs": SPLIT,
    "minibatches": SPLIT,
    "on_nonfinite": "catch the RunError of forward_backward or optim_step",
}
"""Settings of ``train`` → what is done in a session."""


@contextmanager
def trainable_session(
    config: str | Path | Sequence[str | Path] | None = None,
    *,
    algo: Any = None,
    rewards: Any = None,
    model: str | Path | None = None,
    data: Any = None,
    eval_data: Any = None,
    extensions: Any = None,
    trackers: Any = None,
    lr: float | None = None,
    run_dir: str | Path | None = None,
    **settings: Any,
) -> Iterator[TrainableSession]:
    """Starts a run whose loop is yours: sample, give rows a loss, take steps, bring weights to the engine, save and load.

    Args:
        config: what ``--config`` takes, or a list of that.
        algo: gives advantages and loss where a call names no other; default: every loss is the caller's.
        rewards: score what ``draw`` samples.
        model: the actor.
        data: tasks for ``draw``.
        eval_data: tasks for ``evaluate``.
        extensions: filters, shaping, corrections.
        trackers: get what ``log`` is given; default: none.
        lr: peak learning rate of the actor.
        run_dir: a new directory for files of plugins and trackers; default: one that goes with the block.
        **settings: all other settings, as for ``rlhf_host.train``.

    Raises:
        UserError: settings or the model cannot be used.
    """
    named = {"algo": algo, "rewards": rewards, "model": model, "data": data, "eval_data": eval_data}
    named |= {"extensions": extensions, "trackers": trackers, "lr": lr}
    with ExitStack() as stack:
        stack.enter_context(speaking())
        asked = Arguments(named, settings)
        ready, manager = stack.enter_context(configured(asked, "train", config))
        if trackers is None:  # the usual ones would write of every session
            manager = PluginManager([item for item in manager.loaded if item.kind != "tracker"])
        if ready.config.algo is None:
            from rlhf_session.losses import only_actor

            manager.add(only_actor())
        elif ready.config.data.sources:  # without data every row is the caller's
            for warning in check(ready, manager, merge_needs(manager)):
                print(f"Warning: {in_arguments(warning)}", file=sys.stderr)
        directory = Path(run_dir) if run_dir else stack.enter_context(Scratch("rlhf-session-", gettempdir()))
        stack.enter_context(locked(directory))
        if (directory / "config.yaml").exists():
            raise UserError(f"a run was begun in {directory}: choose another run_dir")
        refuse_settings(ready.config)
        settings_here = ready.config.model_copy(update={"run_dir": str(directory)})
        session = _session(settings_here, manager, asked.rows)
        stack.push(session.end)
        session.open()
        yield session


def refuse_settings(config: RunConfig) -> None:
    """Names settings of a run's loop, which a session does not have. Raises ``UserError`` for those that change what is trained."""
    usual = {"train": TrainConfig(), "checkpoint": type(config.checkpoint)(), "eval": type(config.eval)()}
    for name, instead in REFUSED.items():
        if getattr(config.train, name) != getattr(usual["train"], name):
            raise UserError(f"train.{name} is a setting of a run's loop, and a session's loop is yours: {instead}")
    loop = {"eval": ("every", "at_start", "at_end"), "checkpoint": tuple(type(config.checkpoint).model_fields)}
    unused = [
        f"{part}.{name}"
        for part, names in loop.items()
        for name in names
        if getattr(getattr(config, part), name) != getattr(usual[part], name)
    ]
    unused += ["max_restarts"] if config.max_restarts != type(config).model_fields["max_restarts"].default else []
    if unused:
        text = f"{', '.join(unused)} is for the loop of a run, and does nothing here: call evaluate and save"
        print(f"Warning: {text}", file=sys.stderr)


def _session(config: RunConfig, manager: PluginManager, rows: Any) -> TrainableSession:
    from rlhf_session.session import SessionData, TaskData, TrainableSession

    needs = merge_needs(manager)
    if config.data.sources:
        inputs = read_inputs(config, rows, manager, needs)
        if isinstance(inputs.data, TaskData):
            inputs.data = SessionData(inputs.data.tasks, inputs.data.held_out)
    else:
        tokenizer = load_tokenizer(config.roles["actor"])
        check_inputs(config, manager, needs, tokenizer)
        nothing = TaskSet({"": [Task("")]}, {"": 1.0})  # which draw refuses
        inputs = Inputs(config, tokenizer, SessionData(nothing))
    return TrainableSession(config, manager, inputs)
