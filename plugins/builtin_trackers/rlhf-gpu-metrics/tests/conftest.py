"""A stand-in for NVML in place of the real one."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(autouse=True)
def nvml(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = spec_from_file_location("pynvml", Path(__file__).parent / "stand_in/pynvml.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return module
