"""Checks of every plugin: how it is found, loaded, configured and kept."""

from __future__ import annotations

import copy
import inspect
import io
import json
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf_host.errors import PluginError
from rlhf_host.plugins.discovery import GROUPS, PROTOCOLS, discover
from rlhf_host.plugins.options import describe_options
from rlhf_host.plugins.selection import options_model, read_options
from rlhf_host.records.needs import Needs
from rlhf_host.testing.contracts.exercise import exercise
from rlhf_host.testing.contracts.subject import Broken, Subject, expect
from rlhf_host.testing.contracts.suite import check

HEAVY = ("torch", "transformers", "vllm", "ray", "deepspeed")
"""What listing plugins and help pages must not wait for."""

PATIENCE_S = 5.0
"""How long what a run started may take to end after it."""

HOOKED = tuple(kind for kind in GROUPS if kind not in PROTOCOLS)
"""Kinds of plugins that have hooks."""

OF_KIND = {
    "algo": (("needs",), ("compute_advantages", "make_rows", "compute_loss"), ("compute_loss",)),
    "reward": (("score",),),
    "agent": (("agent_reset", "agent_run"), ("agent_step", "agent_run")),
    "tasks": (("load_tasks",),),
    "tracker": (("log_metrics", "log_trajectories"),),
    "weight_sync": (("sync_weights",),),
}
"""Kind → sets of hooks of which it implements one each."""


# --- found and loaded ---------------------------------------------------------------------------


@check(stage="find")
def entry_point_is_unique(subject: Subject) -> None:
    """Exactly one installed distribution provides the name, and its metadata fits this host."""
    info = subject.info
    rivals = [other for other in discover() if (other.kind, other.name) == (info.kind, info.name)]
    expect(len(rivals) == 1, f"{' and '.join(r.source for r in rivals)} all provide {info.kind} {info.name!r}; rename one")


@check(stage="load")
def entry_point_loads(subject: Subject) -> None:
    """The entry point names a class that can be imported."""
    expect(isinstance(subject.cls, type), f"{subject.info.value} is not a class")


@check()
def import_is_light(subject: Subject) -> None:
    """Importing the plugin's module loads none of torch, transformers, vllm, ray and deepspeed: help pages would wait."""
    program = (
        f"import importlib, json, sys; importlib.import_module({subject.info.module!r}); "
        f"print('\\n' + json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    )
    _ = subject.cls  # what cannot be loaded is another check's
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        check=False,
    )
    expect(done.returncode == 0, f"importing {subject.info.module} in a process of its own failed: {done.stderr[-500:]}")
    loaded = json.loads(done.stdout.splitlines()[-1])
    expect(
        not loaded, f"importing {subject.info.module} loads {', '.join(loaded)}; import it inside the functions that need it"
    )


@check()
def host_dependency_is_bounded(subject: Subject) -> None:
    """The distribution requires rlhf-host with an upper bound: a later version may change a hook."""
    from packaging.specifiers import SpecifierSet

    info = subject.info
    bounded = info.api not in ("any", "unstated", "unreadable") and any(
        one.operator in ("<", "<=", "==", "~=") for one in SpecifierSet(info.api)
    )
    expect(bounded, f"{info.distribution} depends on rlhf-host {info.api}; write 'rlhf-host>=0.9,<0.10' in its dependencies")


@check()
def has_a_summary(subject: Subject) -> None:
    """The class's docstring, or else its module's, says in its first line what the plugin is."""
    module = sys.modules.get(subject.cls.__module__)
    own = subject.cls.__dict__.get("__doc__") or getattr(module, "__doc__", None) or ""
    expect(own.strip(), f"{subject.info.value} has no docstring: say in one line what it does")


# --- options ------------------------------------------------------------------------------------


@check()
def options_are_described(subject: Subject) -> None:
    """Every option has a description: it is all that --help can show."""
    silent = [option.name for option in describe_options(options_model(subject.cls)) if not option.description.strip()]
    expect(not silent, f"no description: {', '.join(silent)}; write Field(default, description=...)")


@check()
def options_are_typed(subject: Subject) -> None:
    """Every option has a type that validation can hold a flag's text to."""
    loose = [option.name for option in describe_options(options_model(subject.cls)) if option.type in ("Any", "object")]
    expect(not loose, f"no type: {', '.join(loose)}; annotate with int, float, str, Literal[...] or alike")


@check(stage="options")
def defaults_are_valid(subject: Subject) -> None:
    """The plugin can be built, and its defaults pass the validation that the same values given by a user would get."""
    subject.build()
    model = options_model(subject.cls)
    built = read_options(subject.info, subject.cls, subject.options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pydantic warns of a default of another type; that is what is looked for
        values = built.model_dump(by_alias=True, round_trip=True)
    try:
        again = model.model_validate(values)
    except ValueError as error:
        raise Broken(f"a default does not pass its own validation: {' '.join(str(error).split())}") from error
    changed = [name for name in model.model_fields if _differ(getattr(again, name), getattr(built, name))]
    expect(not changed, f"the default of {', '.join(changed)} is changed by validation: give it in the option's own type")


@check()
def unknown_options_are_refused(subject: Subject) -> None:
    """An option that does not exist is an error: a typo must not train with the default."""
    try:
        read_options(subject.info, subject.cls, {**subject.options, "no_such_option": 1})
    except PluginError:
        return
    raise Broken("it accepts the unknown option 'no_such_option'; set model_config = ConfigDict(extra='forbid') on Options")


# --- hooks --------------------------------------------------------------------------------------


@check(kinds=HOOKED, stage="hooks")
def hooks_are_known(subject: Subject) -> None:
    """Every method marked @hookimpl is a hook of the host, and takes arguments that the hook has."""
    subject.manager().close()


@check(kinds=HOOKED)
def hooks_of_its_kind_are_there(subject: Subject) -> None:
    """It implements what a plugin of its kind is selected for."""
    _ = subject.cls  # what cannot be loaded is another check's
    expect(subject.hooks, f"{subject.info.value} implements no hook: mark its methods with @hookimpl")
    for names in OF_KIND.get(subject.kind, ()):
        expect(subject.hooks & set(names), f"a plugin of kind {subject.kind} implements {' or '.join(names)}")


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


# --- state --------------------------------------------------------------------------------------


@check("state_dict")
def state_survives_a_checkpoint(subject: Subject) -> None:
    """What ``state_dict`` gives after use comes back through a checkpoint, into a fresh instance, as it was."""
    import torch

    from rlhf_host.errors import RunError
    from rlhf_host.training.checkpoints import plain_state

    expect("load_state_dict" in subject.hooks, "it has state_dict without load_state_dict: a resumed run could not go on")
    manager, fresh = subject.manager(), subject.manager()
    exercise(subject, manager)
    try:
        state = plain_state(manager.one("state_dict"), subject.key)
    except RunError as error:
        raise Broken(str(error)) from error
    file = io.BytesIO()
    torch.save({subject.key: state}, file)
    read = torch.load(io.BytesIO(file.getvalue()), weights_only=True)[subject.key]
    fresh.call(subject.key, "load_state_dict", state=read)
    found = plain_state(fresh.one("state_dict"), subject.key)
    expect(not _differ(found, state), f"after load_state_dict the state is {found}, not {state}")


@check(kinds=HOOKED)
def instances_share_nothing(subject: Subject) -> None:
    """Two instances (``--reward a=x --reward b=x``) do not see each other's state."""
    first, second = subject.manager(), subject.manager()
    plugins = [manager.loaded[0].plugin for manager in (first, second)]
    before = {name: _copied(value) for name, value in _class_attributes(subject.cls)}
    state = _copied(second.one("state_dict")) if "state_dict" in subject.hooks else None
    exercise(subject, first)
    own = [{id(value): name for name, value in vars(plugin).items() if _mutable(value)} for plugin in map(_with_vars, plugins)]
    shared = sorted(own[0][found] for found in own[0].keys() & own[1].keys())
    expect(not shared, f"two instances share the object behind self.{', self.'.join(shared)}: make it in __init__")
    for name, value in _class_attributes(subject.cls):
        expect(name in before and not _differ(before[name], value), f"use changes the class attribute {name}: keep it on self")
    if state is not None:
        expect(not _differ(second.one("state_dict"), state), "using one instance changes the state of another")


@check(kinds=HOOKED)
def nothing_outlives_the_run(subject: Subject) -> None:
    """Once ``run_finished`` was called, no process and no thread that would keep the interpreter alive is left."""
    threads, processes = set(threading.enumerate()), _children()
    exercise(subject, subject.manager())
    end = time.monotonic() + PATIENCE_S
    while True:
        left = [t.name for t in threading.enumerate() if t not in threads and not t.daemon]
        running = _children().keys() - processes.keys()
        if not left and not running:
            return
        if time.monotonic() > end:
            break
        time.sleep(0.02)
    names = [*(f"thread {name}" for name in left), *(f"process {pid} ({_children().get(pid, '')})" for pid in running)]
    raise Broken(f"after the run there is still {', '.join(names)}; end it in run_finished")


def _children() -> dict[int, str]:
    """This process's living children and what they run, where the system shows them."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:  # ended just now
            continue
        # multiprocessing's tracker stays until the interpreter ends, whoever started it.
        if int(parent) == os.getpid() and state not in "ZX" and "resource_tracker" not in command:
            found[int(folder.name)] = command
    return found


class _NoVars:
    pass


def _with_vars(plugin: object) -> object:
    return plugin if hasattr(plugin, "__dict__") else _NoVars()


def _mutable(value: Any) -> bool:
    return isinstance(value, list | dict | set | bytearray) or type(value).__name__ == "Tensor"


def _class_attributes(cls: type) -> Iterator[tuple[str, Any]]:
    for owner in cls.__mro__[:-1]:
        for name, value in vars(owner).items():
            data = not callable(value) and not isinstance(value, property | classmethod | staticmethod)
            if data and not (name.startswith("__") and name.endswith("__")) and not inspect.ismemberdescriptor(value):
                yield f"{owner.__name__}.{name}", value


def _copied(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # a lock or alike: its identity is all there is to compare
        return value


def _differ(a: Any, b: Any) -> bool:
    if hasattr(a, "shape") or hasattr(b, "shape"):
        return type(a) is not type(b) or a.shape != b.shape or not bool(((a == b) | ((a != a) & (b != b))).all())
    if type(a) is not type(b):
        return True
    if isinstance(a, dict):
        return a.keys() != b.keys() or any(_differ(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) != len(b) or any(_differ(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float) and a != a:
        return b == b
    return bool(a != b)
