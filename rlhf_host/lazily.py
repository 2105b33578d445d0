"""Public names of a package that are imported on first use."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazily(
    package: str, homes: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Returns a package's ``__getattr__``, ``__dir__`` and ``__all__``.

    Args:
        package: its ``__name__``.
        homes: name → the module that has it. Default: what the package imports under ``if TYPE_CHECKING``. So names are written
            once, for type checkers, editors and Python; to type checkers ``NAME as NAME`` is a public name.
    """
    known = _imported_for_types(package) if homes is None else homes
    names = sorted(known)

    def get(name: str) -> Any:
        if name not in known:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(known[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: names, names


def _imported_for_types(package: str) -> dict[str, str]:
    loader: Any = sys.modules[package].__loader__
    (block,) = (node for node in ast.parse(loader.get_source(package)).body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}
