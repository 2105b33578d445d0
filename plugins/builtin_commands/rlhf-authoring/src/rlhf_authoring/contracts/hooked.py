"""Checks of every plugin that has hooks: which ones, what it needs, and its state."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from rlhf_authoring.calls import Calls
from rlhf_authoring.contracts.batches import advantages_of, make_batch, make_groups
from rlhf_authoring.contracts.common import differ
from rlhf_authoring.contracts.offline_batches import offline_batch
from rlhf_authoring.contracts.session import running
from rlhf_authoring.contracts.subject import Subject, check, expect
from rlhf_authoring.contracts.traces import leaves_nothing
from rlhf_host import Needs, hookspecs
from rlhf_host.internals import PluginManager, apply_rewards, plain_state

OF_KIND = {
    "algo": (("needs",), ("compute_advantages", "make_rows", "compute_loss"), ("compute_loss",)),
    "reward": (("score",),),
    "agent": (("agent_reset", "agent_run"), ("agent_step", "agent_run")),
    "tasks": (("load_tasks",),),
    "tracker": (("log_metrics", "log_trajectories"),),
}
"""Kind → sets of hooks of which it implements one each."""


@check(stage="hooks")
def hooks_are_known(subject: Subject) -> None:
    """Every method marked @hookimpl is a hook of the host, and takes arguments that the hook has."""
    subject.manager().close()


@check()
def hooks_of_its_kind_are_there(subject: Subject) -> None:
    """It implements what a plugin of its kind is selected for."""
    _ = subject.cls  # what cannot be loaded is another check's
    expect(subject.hooks, f"{subject.info.value} implements no hook: mark its methods with @hookimpl")
    for names in OF_KIND.get(subject.kind, ()):
        expect(subject.hooks & set(names), f"a plugin of kind {subject.kind} implements {' or '.join(names)}")


@check()
def hooks_are_marked(subject: Subject) -> None:
    """Every method with the name of a hook is marked @hookimpl: the host never calls the others."""
    package = subject.cls.__module__.partition(".")[0]
    own = [owner for owner in subject.cls.__mro__ if owner.__module__.partition(".")[0] == package]
    for name in hookspecs.RULES:
        there = any(name in vars(owner) for owner in own) and callable(getattr(subject.cls, name))
        expect(not there or name in subject.hooks, f"{name} is not marked @hookimpl, so the host never calls it")


@check("needs")
def needs_are_pure(subject: Subject) -> None:
    """``needs()`` is a Needs, the same at every call and for every instance with the same options, before and after use."""
    manager = subject.manager()
    first = manager.one("needs")
    expect(isinstance(first, Needs), f"needs() gave a {type(first).__name__}, not a Needs")
    names = [role.name for role in first.roles]
    expect(len(set(names)) == len(names), f"needs() names a role twice: {names}")
    expect(manager.one("needs") == first, "needs() changes from one call to the next")
    expect(subject.manager().one("needs") == first, "needs() differs between two instances with the same options")


@check("state_dict")
def state_survives_a_checkpoint(subject: Subject) -> None:
    """The answer of ``state_dict`` after use comes back through a checkpoint, into a fresh instance, as it was."""
    expect("load_state_dict" in subject.hooks, "it has state_dict without load_state_dict: a resumed run could not go on")
    manager, fresh = subject.manager(), subject.manager()
    _exercise(subject, manager)
    file = io.BytesIO()
    state = plain_state(manager.one("state_dict"), subject.key)
    torch.save(state, file)
    file.seek(0)
    fresh.call(subject.key, "load_state_dict", state=torch.load(file, weights_only=True))
    loaded = plain_state(fresh.one("state_dict"), subject.key)
    expect(not differ(loaded, state), f"after load_state_dict the state is {loaded}, not {state}")


@check("compute_advantages", "transform_rewards", "shape_rewards", "loss_masks", "keep_group")
def what_was_learnt_survives_a_checkpoint(subject: Subject) -> None:
    """After use, an instance answers as a fresh one that took up its state: a resumed run goes on as it would have."""
    used, fresh = subject.manager(), subject.manager()
    _exercise(subject, used)
    stateful = {"state_dict", "load_state_dict"} <= subject.hooks
    if stateful:
        state = copy.deepcopy(plain_state(used.one("state_dict"), subject.key))
        fresh.call(subject.key, "load_state_dict", state=state)
    what = "load_state_dict does not bring it back" if stateful else "there is no state_dict with it"
    same = not differ(_answers(subject, fresh), _answers(subject, used))
    expect(same, f"what it answers depends on what it saw before, and {what}: a resumed run would go another way")


def _answers(subject: Subject, manager: PluginManager) -> list[Any]:
    """Returns what hooks over a batch, and filters, make of one."""
    if subject.offline:
        made = offline_batch(subject, manager)
        return [made.loss_mask, made.extra]
    groups = make_groups((4, 2, 3), turns=3, seed=5)
    batch = make_batch(subject, groups)
    if "compute_advantages" in subject.hooks:
        advantages_of(manager, batch)
    else:
        apply_rewards(batch, manager)
    kept = [repr(verdict) for group in groups for _, verdict in manager.each("keep_group", group=group)]
    return [batch.rewards, batch.shaped, batch.loss_mask, batch.advantages, kept]


@check()
def instances_share_nothing(subject: Subject) -> None:
    """Two instances (``--reward a=x --reward b=x``) do not see each other's state."""
    first, second = subject.manager(), subject.manager()
    before = {name: _copy(value) for name, value in _class_attributes(subject.cls)}
    state = _copy(second.one("state_dict"))
    _exercise(subject, first)
    own, others = (_mutable_attributes(manager.loaded[0].plugin) for manager in (first, second))
    shared = sorted(own[number] for number in own.keys() & others.keys())
    expect(not shared, f"two instances share the object behind self.{', self.'.join(shared)}: make it in __init__")
    for name, value in _class_attributes(subject.cls):
        expect(name in before and not differ(before[name], value), f"use changes the class attribute {name}: keep it on self")
    expect(not differ(second.one("state_dict"), state), "using one instance changes the state of another")


@check()
def nothing_outlives_the_run(subject: Subject) -> None:
    """Once ``run_finished`` was called, no process and no thread that would keep the interpreter alive is left."""
    with leaves_nothing("the run", "end it in run_finished"):
        _exercise(subject, subject.manager())


def _mutable_attributes(plugin: object) -> dict[int, str]:
    """Names by identity."""
    values = getattr(plugin, "__dict__", {})
    kinds = (list, dict, set, bytearray, torch.Tensor)
    return {id(value): name for name, value in values.items() if isinstance(value, kinds)}


def _class_attributes(cls: type) -> Iterator[tuple[str, Any]]:
    for owner in cls.__mro__[:-1]:
        for name, value in vars(owner).items():
            data = not callable(value) and not isinstance(value, property | classmethod | staticmethod)
            if data and not (name.startswith("__") and name.endswith("__")) and not inspect.ismemberdescriptor(value):
                yield f"{owner.__name__}.{name}", value


def _copy(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # a lock or alike: its identity is all there is to compare
        return value


def _exercise(subject: Subject, manager: PluginManager) -> None:
    """One step of a run with every hook the plugin has; what a hook does wrong is for its own checks to report."""
    with (
        contextlib.suppress(Exception),
        tempfile.TemporaryDirectory() as folder,
        running(subject, manager, run_dir=Path(folder)) as session,
    ):
        calls = Calls(session, rows=6, judged=4, tokens=8)
        for hook in manager.hooks(subject.key):
            with contextlib.suppress(Exception):
                for call in calls.of(hook):
                    call.run(call.prepare())
