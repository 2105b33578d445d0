"""Answers of hooks, held against what the contract says that they give; and tensors that no hook may change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import fields as fields_of
from typing import Any

from rlhf_host.errors import a
from rlhf_host.hookspecs import HookRule, Items
from rlhf_host.records.tensors import Batch, PolicyLogprobs


def other_answer(rule: HookRule, answer: Any, arguments: Mapping[str, Any]) -> tuple[str, str] | None:
    """Returns what an answer to a call with ``arguments`` is, and what it should be; ``None`` if the rule gives such answers."""
    types = tuple(kind for kind in rule.gives if isinstance(kind, type))
    if not rule.gives or isinstance(answer, types) or (answer is None and None in rule.gives):
        return None
    wrong = [other_items(kind, answer) for kind in rule.gives if isinstance(kind, Items)]
    if None in wrong:
        return None
    shapes = [kind for kind in rule.gives if isinstance(kind, str)]
    if not shapes:
        known = (kind.__name__ if isinstance(kind, type) else str(kind) for kind in rule.gives)
        return next(filter(None, wrong), a(type(answer).__name__)), " or ".join(known)
    from torch import Tensor

    mask = arguments["experience" if "experience" in arguments else "batch"].action_mask
    whole, boolean = [list(mask.shape[: 1 + ("T" in shape)]) for shape in shapes], "bool" in shapes[0]
    expected = "a tensor " + " or ".join(map(str, whole)) + " of bool" * boolean
    if not isinstance(answer, Tensor):
        return type(answer).__name__, expected
    if list(answer.shape) not in whole:
        return str(list(answer.shape)), expected
    return None if not boolean or answer.dtype == mask.dtype else (f"{list(answer.shape)} of {answer.dtype}", expected)


def other_items(kind: Items, answer: Any) -> str | None:
    """Returns what an answer is where it is no such list. One that must be read to tell is read by the caller first."""
    unordered, shape = isinstance(answer, str | bytes | Mapping | Set), getattr(answer, "shape", None)
    if unordered or not isinstance(answer, Iterable) or shape == () or (kind.types and shape is not None):
        return a(type(answer).__name__)
    for item in answer if kind.types else ():
        if not isinstance(item, kind.types):
            return f"{a(type(item).__name__)} in {a(type(answer).__name__)}"
    return None


Versions = list[tuple[str, Any, int]]
"""Tensors with their names and versions; any change in place raises a tensor's version."""


def versions(arguments: Mapping[str, Any]) -> Versions:
    """Returns the tensors in a hook's arguments that other plugins and the host use too: all but the rewards passed on."""
    tensors = []
    for argument, value in arguments.items():
        if isinstance(value, PolicyLogprobs):
            tensors += [(argument, each) for each in value]
        if not isinstance(value, Batch):
            continue
        fields = [(each.name, getattr(value, each.name)) for each in fields_of(value)]
        nested = [(name, value) for name, values in fields if isinstance(values, Mapping) for value in values.values()]
        nested += [(name, value) for name, values in nested if isinstance(values, Mapping) for value in values.values()]
        tensors += fields + nested
    return [(name, tensor, tensor._version) for name, tensor in tensors if hasattr(tensor, "_version")]


def changed(before: Versions, after: Versions) -> str | None:
    """Returns the name of a tensor that was changed in place or replaced."""
    for (name, tensor, version), (_, now, later) in zip(before, after, strict=False):
        if tensor is not now or version != later:
            return name
    return None
