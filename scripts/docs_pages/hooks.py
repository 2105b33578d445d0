"""The page of hooks."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

from docs_pages.markdown import prose, table
from rlhf_host import hookspecs

CALLS = {
    "one": "one",
    "each": "each result is used on its own",
    "all": "all are called",
    "chained": "chained in the order of selection",
    "summed": "summed",
    "and": "all must agree",
    "multiplied": "multiplied",
}
"""A rule of ``hookspecs`` in words."""


def page() -> str:
    source = Path(hookspecs.__file__).read_text(encoding="utf-8")
    sections = _sections(source)
    overview = [(f"[`{name}`](#{name})", *_where(name), section) for section, names in sections.items() for name in names]
    parts = [
        "# Hooks",
        prose(ast.get_docstring(ast.parse(source)) or ""),
        "A method marked `@hookimpl` implements the hook with the same name. It names only the arguments that it uses.",
        "Types are described in [records](records.md).",
        table(("hook", "runs on", "implementations", "part"), overview),
    ]
    for section, names in sections.items():
        parts.append(f"## {section}")
        for name in names:
            where, calls = _where(name)
            rule = f"Runs on: {where}. Implementations: {calls}."
            parts += [f"### `{name}` {{ #{name} }}", f"```python\n{signature(name)}\n```", _explained(name), rule]
    return "\n\n".join(parts)


def signature(hook: str) -> str:
    """The hook's own lines in ``hookspecs.py``, without body."""
    text = inspect.getsource(getattr(hookspecs, hook))
    return text[text.index("def ") : text.index(':\n    """') + 1].removesuffix(":")


def _sections(source: str) -> dict[str, list[str]]:
    """Section heading → hooks, as ``hookspecs.py`` has them."""
    sections: dict[str, list[str]] = {}
    current: list[str] = []
    for line in source.splitlines():
        if heading := re.match(r"# --- (.+?) -+$", line):
            current = sections.setdefault(heading[1].capitalize(), [])
        elif found := re.match(r"def (\w+)\(", line):
            current.append(found[1])
    return sections


def _where(hook: str) -> tuple[str, str]:
    """Controller or worker, and how many implementations there may be and what becomes of their results."""
    rule = hookspecs.RULES[hook]
    return rule.where, "one per agent name" if rule.per == "agent" else CALLS[rule.calls]


def _explained(hook: str) -> str:
    return prose(inspect.getdoc(getattr(hookspecs, hook)) or "")
