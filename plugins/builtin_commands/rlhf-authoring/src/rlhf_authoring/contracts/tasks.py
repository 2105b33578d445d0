"""Checks of ``load_tasks``: tasks that can be read, the same every time, and held-out ones that nobody trains on."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Mapping
from itertools import islice
from typing import Any, Literal

import torch

from rlhf_authoring.contracts.session import tokenizer
from rlhf_authoring.contracts.subject import Broken, Subject, check, expect
from rlhf_host import Task, UserError
from rlhf_host.internals import PluginManager, load_tasks
from rlhf_host.settings import DataConfig, DataSource

MOST = 1000
"""Tasks read of a split; sources may go on for ever."""
SPLITS: tuple[Literal["train"], Literal["eval"]] = ("train", "eval")


def _load(manager: PluginManager, split: str, seed: int) -> list[Any]:
    return list(islice(manager.one("load_tasks", split=split, seed=seed) or (), MOST))


def _load_anew(subject: Subject, split: str, seed: int = 0) -> list[Any]:
    """The first tasks of a split, as the hook of a fresh instance gives them."""
    with contextlib.closing(subject.manager()) as manager:
        return _load(manager, split, seed)


@check("load_tasks")
def tasks_are_well_formed(subject: Subject) -> None:
    """A training split has tasks, each with a prompt that the host can render; what else a split holds can be read too."""
    for split in SPLITS:
        if not _load_anew(subject, split):
            expect(split == "eval", "the split 'train' has no tasks")
            continue
        source = DataSource(path=f"{subject.info.distribution}:{subject.info.name}", max_samples=MOST, **subject.options)
        try:
            load_tasks(DataConfig(sources=[source]), split=split, tokenizer=tokenizer(), seed=0)
        except UserError as error:
            raise Broken(f"the host cannot read the split {split!r}: {error}") from error


@check("load_tasks")
def tasks_are_the_same_again(subject: Subject) -> None:
    """The same split and seed give the same tasks in the same order, at every call: a resumed run skips what it has seen. A source
    with a state goes on instead, and so does another instance with that state.
    """
    stateful = {"state_dict", "load_state_dict"} <= subject.hooks
    with contextlib.closing(subject.manager()) as manager, contextlib.closing(subject.manager()) as other:
        for split in SPLITS:
            first, state = _load(manager, split, 3), manager.call(subject.key, "state_dict")
            second = _load(manager, split, 3)
            if not stateful:
                expect(first == second, f"a second call gives other tasks for the split {split!r} and the same seed")
            elif split == "train":
                other.call(subject.key, "load_state_dict", state=copy.deepcopy(state))
                expect(_load(other, split, 3) == second, "another instance with the same state goes on with other tasks")
            expect(_load_anew(subject, split, 3) == first, f"two instances give other tasks for the split {split!r}")


@check("load_tasks")
def splits_share_no_task(subject: Subject) -> None:
    """No task of the split ``eval`` is one of ``train``, whatever the seeds: a run is not judged by what it has seen."""
    held_out, train = ({_content(task) for task in _load_anew(subject, *which)} for which in (("eval", 1), ("train", 2)))
    for content in held_out & train:
        raise Broken(f"the splits 'train' and 'eval' share the task {content[:80]}")


def _content(task: Any) -> str:
    """Returns what makes two tasks the same: all that the policy and the reward see."""
    if isinstance(task, Task):
        return repr((task.prompt, task.ground_truth, dict(task.metadata)))
    row = dict(task) if isinstance(task, Mapping) else {"prompt": task}
    return repr((row.pop("prompt", None), row.pop("label", None), row))


@check("load_tasks")
def randomness_of_others_is_left_alone(subject: Subject) -> None:
    """Loading draws nothing from Python's and torch's global generators: draw from ``random.Random(seed)``."""
    before = random.getstate(), torch.get_rng_state()
    for split in SPLITS:
        _load_anew(subject, split)
    expect(random.getstate() == before[0], "loading tasks draws from the global random module; use random.Random(seed)")
    expect(torch.equal(torch.get_rng_state(), before[1]), "loading tasks draws from torch's global generator")
