"""The pages of records and protocols."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from docs_pages.markdown import code, prose, table
from rlhf_host import protocols
from rlhf_host.protocols import (
    backends,
    common,
    data,
    engines,
    kernels,
    memory,
    reward_forms,
    runtimes,
    servers,
    splits,
    step_models,
    syncs,
)
from rlhf_host.records import endpoints, episodes, generations, messages, needs, tensors

PROTOCOL_MODULES = (
    common,
    engines,
    syncs,
    backends,
    splits,
    runtimes,
    kernels,
    servers,
    data,
    memory,
    step_models,
    reward_forms,
)


def records_page() -> str:
    parts = [
        "# Records",
        "What hooks receive and return. Import them from `rlhf_host`, except `Message` and the aliases below, which are"
        " plain values.",
    ]
    aliases: list[tuple[str, str, str]] = []
    for module in (episodes, generations, messages, endpoints, needs, tensors):
        parts += _classes(module, "##", aliases)
    parts += ["## Aliases", table(("name", "is", ""), aliases)]
    return "\n\n".join(parts)


def protocols_page() -> str:
    parts = ["# Protocols", prose(inspect.getdoc(protocols) or ""), "Import all names from `rlhf_host.protocols`."]
    aliases: list[tuple[str, str, str]] = []
    for module in PROTOCOL_MODULES:
        name = module.__name__.rpartition(".")[2]
        parts += [f"## {name.capitalize()} {{ #{name} }}", prose(inspect.getdoc(module) or "")]
        parts += _classes(module, "###", aliases)
    parts += ["## Aliases", table(("name", "is", ""), aliases)]
    return "\n\n".join(parts)


def _classes(module: ModuleType, level: str, aliases: list[tuple[str, str, str]]) -> Iterator[str]:
    """A section for every class of the module; its aliases are appended."""
    nodes = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8")).body
    for node, following in zip(nodes, [*nodes[1:], None], strict=True):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from (f"{level} `{node.name}` {{ #{node.name} }}", *record(node))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            value = node.value.value if isinstance(node.value, ast.Constant) else ast.unparse(node.value)
            aliases.append((code(node.target.id), code(str(value)), prose(_string(following))))


def record(node: ast.ClassDef) -> Iterator[str]:
    yield prose(ast.get_docstring(node) or "")
    for base in map(ast.unparse, node.bases):
        if base in ("Batch", "Mask"):
            yield f"All fields of [`{base}`](#{base}), and:"
    fields, members = [], []
    for item, following in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and not item.target.id.startswith("_"):
            fields.append((item.target.id, ast.unparse(item.annotation), item.value, _string(following)))
        elif isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
            members += _member(item, fields)
    if fields:
        rows = [
            (code(name), code(kind), code(_default(value)) or "required", prose(about)) for name, kind, value, about in fields
        ]
        yield table(("field", "type", "default", ""), rows)
    if members:
        yield table(("member", ""), members)


def _member(item: ast.FunctionDef | ast.AsyncFunctionDef, fields: list[Any]) -> Iterator[tuple[str, str]]:
    if item.name == "__init__":
        positional = item.args.args[1:]
        defaults = [None] * (len(positional) - len(item.args.defaults)) + list(item.args.defaults)
        for argument, default in zip(positional, defaults, strict=True):
            fields.append((argument.arg, ast.unparse(argument.annotation) if argument.annotation else "", default, ""))
    elif not item.name.startswith("_"):
        about = prose(ast.get_docstring(item) or "")
        if any(ast.unparse(decorator) == "property" for decorator in item.decorator_list):
            returns = ast.unparse(item.returns) if item.returns else ""
            yield code(f"{item.name}: {returns}"), about
        else:
            waits = "await " if isinstance(item, ast.AsyncFunctionDef) else ""
            arguments = ast.unparse(item.args).removeprefix("self, ").removeprefix("self")
            yield code(f"{waits}{item.name}({arguments}) -> {ast.unparse(item.returns) if item.returns else ''}"), about


def _default(value: ast.expr | None) -> str:
    if value is None:
        return ""
    text = ast.unparse(value)
    if text.startswith("field("):
        made = re.search(r"default_factory=(\w+)", text)
        default = re.search(r"default=([^,)]+)", text)
        return {"dict": "{}", "list": "[]"}.get(made[1], made[1]) if made else default[1] if default else ""
    return text


def _string(node: ast.stmt | None) -> str:
    value = node.value if isinstance(node, ast.Expr) else None
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""
