"""The pages of functions: ``rlhf_host.functional``, Python, testing."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

import rlhf_authoring
import rlhf_samples
from pydantic import BaseModel
from rlhf_authoring.contracts import subject as contracts
from rlhf_rows import losses

from docs_pages.markdown import code, options_table, prose
from docs_pages.records import record
from rlhf_host import api, functional
from rlhf_host.plugins.options import describe_options


def functional_page() -> str:
    return _page(
        "Functions",
        "`rlhf_host.functional`, usually imported as `F`: tensor functions that algorithms share.",
        ("`F.policy_losses` maps a name to the loss of each token", functional.policy_losses),
        functional,
    )


def losses_page() -> str:
    return _page(
        "Losses of rows",
        "`rlhf_rows.losses`, of the package `rlhf-rows`: losses of pairs and of single answers.",
        ("`losses.preference_losses` maps a name to the loss of each pair", losses.preference_losses),
        losses,
    )


def _page(title: str, about: str, table: tuple[str, Iterable[str]], module: ModuleType) -> str:
    """Returns the page of a module of functions. ``table``: what is said of its losses by name, and these names."""
    named = f"{table[0]}: {', '.join(map(code, table[1]))}."
    return "\n\n".join([f"# {title}", f"{about} Importing it loads no torch.", named, *_library(module)])


def _library(module: ModuleType) -> Iterator[str]:
    """Functions and options, in the order of ``__all__``."""
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isfunction(value):
            yield from _function(name, value)
        elif isinstance(value, type) and issubclass(value, BaseModel):
            yield from (f"## `{name}` {{ #{name} }}", prose(value.__doc__ or ""), options_table(describe_options(value)))


def python_page() -> str:
    parts = ["# Python", prose(inspect.getdoc(api) or ""), "[A page with examples](../python.md) comes first."]
    for name in ("train", "evaluate", "session"):
        parts += _function(name, getattr(api, name))
    for name in ("rollout", "replay"):
        parts += _function(f"rlhf_samples.{name}", getattr(rlhf_samples, name))
    nodes = {node.name: node for node in ast.parse(inspect.getsource(api)).body if isinstance(node, ast.ClassDef)}
    return "\n\n".join([*parts, "## `Run` { #Run }", *record(nodes["Run"])])


def testing_page() -> str:
    parts = [
        "# Testing",
        prose(inspect.getdoc(rlhf_authoring) or ""),
        "They are in the package `rlhf-authoring`; `rlhf_host.testing` has the same names. `pip install 'rlhf-host[testing]'`"
        " brings it, and what the tests need besides. [Testing a plugin](../plugins/testing.md) shows their use.",
    ]
    for name in rlhf_authoring.__all__:
        value = getattr(rlhf_authoring, name)
        if inspect.isfunction(value):
            parts += _function(name, value)
        else:
            parts += [f"## `{name}` {{ #{name} }}", prose(value.__doc__ or "")]
    subject = next(
        n for n in ast.parse(inspect.getsource(contracts)).body if isinstance(n, ast.ClassDef) and n.name == "Subject"
    )
    return "\n\n".join([*parts, "## Settings of contracts", _sections_of(ast.get_docstring(subject) or "")])


def _function(name: str, function: Any) -> Iterator[str]:
    """Heading, signature and docstring; a long signature has a line per argument."""
    found = inspect.signature(function)
    arguments = [_argument(parameter) for parameter in found.parameters.values() if not parameter.name.startswith("_")]
    if any(p.kind is inspect.Parameter.KEYWORD_ONLY for p in found.parameters.values()):
        first = next(i for i, p in enumerate(found.parameters.values()) if p.kind is inspect.Parameter.KEYWORD_ONLY)
        arguments.insert(first, "*")
    shown = f"{name}({', '.join(arguments)}) -> {found.return_annotation}"
    if len(shown) > 100:
        lines = "".join(f"    {argument},\n" for argument in arguments)
        shown = f"{name}(\n{lines}) -> {found.return_annotation}"
    yield f"## `{name}` {{ #{name} }}"
    yield f"```python\n{shown}\n```"
    yield _sections_of(function.__doc__ or "")


def _argument(parameter: inspect.Parameter) -> str:
    default = "" if parameter.default is inspect.Parameter.empty else f" = {parameter.default!r}"
    star = {inspect.Parameter.VAR_KEYWORD: "**", inspect.Parameter.VAR_POSITIONAL: "*"}.get(parameter.kind, "")
    return f"{star}{parameter.name}: {parameter.annotation}{default}"


def _sections_of(docstring: str) -> str:
    """Prose, and the sections ``Args:`` and ``Raises:`` as lists."""
    lines: list[str] = []
    inside = False
    for line in prose(docstring).splitlines():
        if line in ("Args:", "Raises:", "Returns:"):
            inside = True
            lines += [f"**{line.removesuffix(':')}**", ""]
        elif inside and (entry := re.match(r"    (\**\w+): (.*)", line)):
            lines.append(f"- `{entry[1]}`: {entry[2]}")
        else:
            inside = inside and (not line or line.startswith("    "))
            lines.append("  " + line.strip() if inside and line else line)
    return "\n".join(lines)
