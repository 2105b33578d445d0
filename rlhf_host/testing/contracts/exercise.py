"""Using a plugin a little, as a run would: so that checks of its state have some to look at."""

from __future__ import annotations

import contextlib
import tempfile
from itertools import islice
from pathlib import Path

from rlhf_host.plugins.manager import PluginManager
from rlhf_host.protocols import SyncTarget
from rlhf_host.testing.contracts.batches import make_groups
from rlhf_host.testing.contracts.session import TASKS, Session, said
from rlhf_host.testing.contracts.subject import Subject
from rlhf_host.testing.contracts.training import online, trainable, training_batch, update
from rlhf_host.testing.weights import ModuleEngine, module_source

ON_BATCHES = frozenset(
    {"compute_advantages", "compute_loss", "transform_rewards", "shape_rewards", "loss_masks", "prepare_batch"}
    | {"importance_weights"}
)
ON_EPISODES = frozenset({"agent_step", "agent_run"})
LOGGING = frozenset({"log_metrics", "log_trajectories"})


def exercise(subject: Subject, manager: PluginManager) -> None:
    """One step of a run with every hook the plugin has; what a hook does wrong is for its own checks to report."""
    for use in (_train, _filter, _run, _finish_steps, _load, _log, _sync):
        with contextlib.suppress(Exception):
            use(subject, manager)


def _train(subject: Subject, manager: PluginManager) -> None:
    if subject.hooks & ON_BATCHES and online(subject):
        batch = training_batch(subject, manager)
        for role in trainable(subject):
            update(subject, manager, role, batch)


def _filter(subject: Subject, manager: PluginManager) -> None:
    if "keep_group" in subject.hooks:
        for group in make_groups((2, 3)):
            manager.one("keep_group", group=group)


def _run(subject: Subject, manager: PluginManager) -> None:
    if subject.hooks & (ON_EPISODES | {"score", "run_started", "run_finished"}):
        with Session(subject, manager) as session:
            if "score" in subject.hooks:
                session.score(session.judged())
            if subject.hooks & ON_EPISODES:
                session.play()


def _finish_steps(subject: Subject, manager: PluginManager) -> None:
    if "step_finished" in subject.hooks:
        for step, value in enumerate((0.5, 0.25), start=1):
            metrics = {"kl": value, "reward/mean": value, "score/mean": value, "length/mean": 10.0, "loss": -value}
            manager.call(subject.key, "step_finished", step=step, metrics=metrics)


def _load(subject: Subject, manager: PluginManager) -> None:
    if "load_tasks" in subject.hooks:
        for split in ("train", "eval"):
            list(islice(manager.one("load_tasks", split=split, seed=0) or (), 100))
    if "draw_tasks" in subject.hooks:
        manager.one("draw_tasks", tasks=TASKS, count=3, step=1)


def _log(subject: Subject, manager: PluginManager) -> None:
    if subject.hooks & LOGGING:
        with tempfile.TemporaryDirectory() as folder, Session(subject, manager, run_dir=Path(folder)):
            manager.call(subject.key, "log_metrics", step=1, metrics={"loss": 0.5, "reward/mean": 0.25})
            manager.call(subject.key, "log_trajectories", step=1, split="train", trajectories=[said("4", TASKS[0])])


def _sync(subject: Subject, manager: PluginManager) -> None:
    if "sync_weights" in subject.hooks:
        from torch import nn

        model = nn.Linear(3, 2)
        with Session(subject, manager) as session:
            engines = [SyncTarget("engine-0", ModuleEngine(model), in_place=True)]
            for hook, arguments in (
                ("sync_connect", {"targets": engines}),
                ("sync_weights", {"source": module_source(model), "version": 1}),
                ("sync_close", {}),
            ):
                session.wait(manager.acall(subject.key, hook, **arguments), hook)
