"""Checks of ``load_tasks``: tasks that can be read, the same every time, and held-out ones that nobody trains on."""

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import islice
from typing import Any, Literal

from rlhf_host.config.schema import DataConfig, DataSource
from rlhf_host.data.sources import load_tasks
from rlhf_host.errors import UserError
from rlhf_host.records.episodes import Task
from rlhf_host.testing.contracts.session import tokenizer
from rlhf_host.testing.contracts.subject import Broken, Subject, expect
from rlhf_host.testing.contracts.suite import check

MOST = 1000
"""Tasks read of a split; sources may go on for ever."""


def _read(subject: Subject, split: str, seed: int = 0) -> list[Any]:
    """The first tasks of a split, as the hook of a fresh instance gives them."""
    manager = subject.manager()
    try:
        return list(islice(manager.one("load_tasks", split=split, seed=seed) or (), MOST))
    finally:
        manager.close()


@check("load_tasks")
def tasks_are_well_formed(subject: Subject) -> None:
    """A training split has tasks, each with a prompt that the host can render; what else a split holds can be read too."""
    splits: tuple[Literal["train", "eval"], ...] = ("train", "eval")
    for split in splits:
        if not _read(subject, split):
            expect(split == "eval", "the split 'train' has no tasks")
            continue
        source = DataSource(path=f"{subject.info.distribution}:{subject.info.name}", max_samples=MOST, **subject.options)
        try:
            load_tasks(DataConfig(sources=[source]), split=split, tokenizer=tokenizer(), seed=0)
        except UserError as error:
            raise Broken(f"the host cannot read the split {split!r}: {error}") from error


@check("load_tasks")
def tasks_are_the_same_again(subject: Subject) -> None:
    """The same split and seed give the same tasks in the same order, at every call: a resumed run skips what it has seen."""
    manager = subject.manager()
    try:
        for split in ("train", "eval"):
            first, second = (
                list(islice(manager.one("load_tasks", split=split, seed=3) or (), MOST)) for _ in ("once", "again")
            )
            expect(first == second, f"a second call gives other tasks for the split {split!r} and the same seed")
            expect(_read(subject, split, seed=3) == first, f"two instances give other tasks for the split {split!r}")
    finally:
        manager.close()


@check("load_tasks")
def splits_share_no_task(subject: Subject) -> None:
    """No task of the split ``eval`` is one of ``train``, whatever the seeds: a run is not judged by what it has seen."""
    held_out = {_asked(task): task for task in _read(subject, "eval", seed=1)}
    for task in _read(subject, "train", seed=2):
        expect(_asked(task) not in held_out, f"the splits 'train' and 'eval' share the task {_asked(task)[:80]}")


def _asked(task: Any) -> str:
    """What makes two tasks the same: all that the policy and the reward see."""
    if isinstance(task, Task):
        return repr((task.prompt, task.ground_truth, dict(task.metadata)))
    row = dict(task) if isinstance(task, Mapping) else {"prompt": task}
    return repr((row.pop("prompt", None), row.pop("label", None), row))


@check("load_tasks")
def randomness_of_others_is_left_alone(subject: Subject) -> None:
    """Loading draws nothing from Python's and torch's global generators: draw from ``random.Random(seed)``."""
    import torch

    before = random.getstate(), torch.get_rng_state()
    for split in ("train", "eval"):
        _read(subject, split)
    expect(random.getstate() == before[0], "loading tasks draws from the global random module; use random.Random(seed)")
    expect(torch.equal(torch.get_rng_state(), before[1]), "loading tasks draws from torch's global generator")
