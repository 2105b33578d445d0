"""Stations from ``rlhf train`` to the optimizer's step: the functions of docs/architecture.md, with their lines.

python scripts/stations.py
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/architecture.md"
ROW = re.compile(r"^\| \d+ \| `([\w/]+\.py)` `([\w.]+)` \|", re.M)


@dataclass(frozen=True)
class Station:
    file: str
    """Relative to ``rlhf_host/``."""
    name: str
    first: int
    """Its line ``def``."""
    last: int


def stations() -> list[Station]:
    """Returns those of the page, in its order. Raises ``LookupError`` for one that is not in its file."""
    return [_station(file, name) for file, name in ROW.findall(PAGE.read_text(encoding="utf-8"))]


def _station(file: str, name: str) -> Station:
    found = dict(_functions(ast.parse((ROOT / "rlhf_host" / file).read_text(encoding="utf-8"))))
    if name not in found:
        raise LookupError(f"rlhf_host/{file} has no function {name}, which {PAGE.name} names")
    function = found[name]
    return Station(file, name, function.lineno, function.end_lineno or function.lineno)


def _functions(node: ast.AST, within: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield within + child.name, child
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{within}{child.name}.")


if __name__ == "__main__":
    found = stations()
    for number, station in enumerate(found, 1):
        print(f"{number:2}  rlhf_host/{station.file}:{station.first}  {station.name}")
    print(f"{len(found)} stations in {len({station.file for station in found})} files")
