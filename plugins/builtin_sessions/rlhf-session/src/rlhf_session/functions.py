"""``trainable_session``, with the arguments of ``rlhf_host.train``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, Any

from rlhf_host import Scratch, Task, UserError
from rlhf_host.internals import Inputs, PluginManager, TaskSet, check_inputs, load_tokenizer, locked, read_inputs
from rlhf_host.sampling import Arguments, configured, in_arguments, speaking
from rlhf_host.settings import check, merge_needs

if TYPE_CHECKING:
    from rlhf_host.settings import RunConfig
    from rlhf_session.session import TrainableSession


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
        settings_here = ready.config.model_copy(update={"run_dir": str(directory)})
        session = _session(settings_here, manager, asked.rows)
        stack.enter_context(closing(session))
        session.open()
        yield session


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
