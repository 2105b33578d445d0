"""Checks of every plugin: how it is found, loaded and configured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from typing import Any

from rlhf_host.errors import PluginError
from rlhf_host.plugins.discovery import discover
from rlhf_host.plugins.options import describe_options
from rlhf_host.plugins.selection import options_model, read_options
from rlhf_host.testing.contracts.subject import Broken, Subject, check, expect

HEAVY = ("torch", "transformers", "vllm", "ray", "deepspeed")
"""What listing plugins and help pages must not wait for."""


@check(stage="find")
def entry_point_is_unique(subject: Subject) -> None:
    """Exactly one installed distribution provides the name, and its metadata fits this host."""
    info = subject.info
    sources = [other.source for other in discover() if (other.kind, other.name) == (info.kind, info.name)]
    expect(len(sources) == 1, f"{' and '.join(sources)} all provide {info.kind} {info.name!r}; rename one")


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
    heavy = ", ".join(json.loads(done.stdout.splitlines()[-1]))
    expect(not heavy, f"importing {subject.info.module} loads {heavy}; import it inside the functions that need it")


@check()
def host_dependency_is_bounded(subject: Subject) -> None:
    """The distribution requires rlhf-host with an upper bound: a later version may change a hook."""
    from packaging.specifiers import SpecifierSet

    info = subject.info
    specifiers = SpecifierSet("" if info.api in ("any", "unstated", "unreadable") else info.api)
    bounded = any(one.operator in ("<", "<=", "==", "~=") for one in specifiers)
    expect(bounded, f"{info.distribution} depends on rlhf-host {info.api}; write 'rlhf-host>=0.9,<0.10' in its dependencies")


@check()
def has_a_summary(subject: Subject) -> None:
    """The class's docstring, or else its module's, says in its first line what the plugin is."""
    module = sys.modules.get(subject.cls.__module__)
    own = subject.cls.__dict__.get("__doc__") or getattr(module, "__doc__", None) or ""
    expect(own.strip(), f"{subject.info.value} has no docstring: say in one line what it does")


@check()
def options_are_described(subject: Subject) -> None:
    """Every option has a description: it is all that --help can show."""
    options = describe_options(options_model(subject.cls))
    silent = ", ".join(option.name for option in options if not option.description.strip())
    expect(not silent, f"no description: {silent}; write Field(default, description=...)")


@check()
def options_are_typed(subject: Subject) -> None:
    """Every option has a type that validation can hold a flag's text to."""
    options = describe_options(options_model(subject.cls))
    loose = ", ".join(option.name for option in options if option.type in ("Any", "object"))
    expect(not loose, f"no type: {loose}; annotate with int, float, str, Literal[...] or alike")


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
    changed = [name for name in model.model_fields if differ(getattr(again, name), getattr(built, name))]
    expect(not changed, f"the default of {', '.join(changed)} is changed by validation: give it in the option's own type")


@check()
def unknown_options_are_refused(subject: Subject) -> None:
    """An option that does not exist is an error: a typo must not train with the default."""
    try:
        read_options(subject.info, subject.cls, {**subject.options, "no_such_option": 1})
    except PluginError:
        return
    raise Broken("it accepts the unknown option 'no_such_option'; set model_config = ConfigDict(extra='forbid') on Options")


def differ(a: Any, b: Any) -> bool:
    """Whether two plain values, or tensors in them, are not the same; NaN is the same as NaN."""
    if a is b or type(a) is not type(b):
        return a is not b
    if hasattr(a, "shape"):
        return a.shape != b.shape or a.dtype != b.dtype or not bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, dict):
        return a.keys() != b.keys() or any(differ(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) != len(b) or any(map(differ, a, b))
    return bool(a != b) and not (a != a and b != b)
