"""Calls around a run, whatever happens: ``run_started`` before it, ``run_finished`` after it, and then everything is
closed.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhf_host.config.schema import RunConfig
from rlhf_host.data.chat import task_renderer
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.records.needs import Outcome, RoleHandle, RunContext
from rlhf_host.training.assemble import Started
from rlhf_host.training.events import EventLoop, Interrupted

log = logging.getLogger(__name__)


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
    render = task_renderer(tokenizer, config.data)
    return RunContext(
        config.model_dump(), tokenizer, run_dir, config.seed, handles, resumed, step, steps, tuple(notices), render
    )


@contextmanager
def run_lifecycle(events: EventLoop, manager: PluginManager, context: RunContext) -> Iterator[Outcome]:
    """Calls ``run_started`` before the body and ``run_finished`` after it, with the outcome that the body fills in. Raises
    ``KeyboardInterrupt`` if the body was interrupted.
    """
    call_all(events, manager, "run_started", context=context)
    outcome = Outcome("failed", 0)
    try:
        yield outcome
        outcome.status = "finished"
    except Interrupted:
        outcome.status = "interrupted"
        raise KeyboardInterrupt from None
    finally:
        call_closing(events, manager, outcome)


def call_all(events: EventLoop, manager: PluginManager, hook: str, **arguments: Any) -> None:
    for key in manager.names(hook):
        events.run(manager.acall(key, hook, **arguments), interruptible=False)


def call_closing(events: EventLoop, manager: PluginManager, outcome: Outcome) -> None:
    """Calls ``run_finished`` on every plugin, even if some fail. Raises the first failure unless another error is already on
    its way.
    """
    under_way = sys.exc_info()[1]
    first: Exception | None = None
    for key in manager.names("run_finished"):
        try:
            events.run(manager.acall(key, "run_finished", outcome=outcome), interruptible=False)
        except Exception as error:
            if manager.by_key[key].kind == "tracker":
                log.warning("%s", error)
            else:
                first = first or error
    if first is not None and under_way is None:
        raise first


def close(events: EventLoop, started: Started) -> None:
    """Closes servers, weight sync and runtime, even if some fail. Raises the first failure unless another error is already on its
    way.
    """
    under_way = sys.exc_info()[1]
    first: Exception | None = None
    for each in (part for part in (started.endpoints, started.bring, started.runtime) if part is not None):
        try:
            events.run(each.close(), interruptible=False)
        except Exception as error:
            first = first or error
    if first is not None and under_way is None:
        raise first
