"""Public modules that import a name's home when it is first used."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

MODULES = ("rlhf_host", "rlhf_host.models", "rlhf_host.rollouts", "rlhf_host.runs")


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_there(module):
    found = importlib.import_module(module)
    assert [name for name in found.__all__ if getattr(found, name) is None] == []
    with pytest.raises(AttributeError, match=f"'{module}' has no attribute 'nothing'"):
        _ = found.nothing


def test_importing_them_loads_nothing_heavy():
    code = f"import sys, {', '.join(MODULES)}; print({{'torch', 'transformers', 'pydantic', 'aiohttp'}} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
