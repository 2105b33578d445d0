"""Checks of every plugin that is a class: how it is described and configured."""

from __future__ import annotations

import sys
import warnings
from typing import Any

from rlhf_authoring.contracts.subject import Broken, Subject, check, expect
from rlhf_host import PluginError
from rlhf_host.installed import describe_options, options_model, read_options


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
    """Returns True if two plain values, or tensors in them, are not the same; NaN is the same as NaN."""
    if a is b or type(a) is not type(b):
        return a is not b
    if hasattr(a, "shape"):
        return a.shape != b.shape or a.dtype != b.dtype or not bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, dict):
        return a.keys() != b.keys() or any(differ(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) != len(b) or any(map(differ, a, b))
    return bool(a != b) and not (a != a and b != b)
