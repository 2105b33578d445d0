"""Programs of ``scripts/`` and ``benchmarks/``, as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]


def load_script(path: str) -> ModuleType:
    """The module of a program, by its path in the repository. What it adds to the import path is taken back."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before, known = list(sys.path), sys.modules.get(spec.name)
    sys.modules[spec.name] = module  # dataclasses look there for their types
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = before
        if known is None:
            del sys.modules[spec.name]
        else:
            sys.modules[spec.name] = known
    return module
