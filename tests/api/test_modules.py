"""Public modules that import a name's home when it is first used."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import rlhf_authoring

from rlhf_host import testing

MODULES = (
    "rlhf_host",
    "rlhf_host.backends",
    "rlhf_host.commands",
    "rlhf_host.distributed",
    "rlhf_host.engines",
    "rlhf_host.functional",
    "rlhf_host.installed",
    "rlhf_host.internals",
    "rlhf_host.models",
    "rlhf_host.rollouts",
    "rlhf_host.runs",
    "rlhf_host.sampling",
    "rlhf_host.settings",
    "rlhf_host.trackers",
)


PUBLIC = json.loads(Path(__file__).with_name("snapshot.json").read_text())["names"]


@pytest.mark.parametrize("module", sorted(PUBLIC.keys() - {"rlhf_host.functional.policy_losses"}))
def test_every_public_name_is_there(module):
    found = importlib.import_module(module)
    assert [name for name in PUBLIC[module] if getattr(found, name, None) is None] == []


@pytest.mark.parametrize("module", MODULES)
def test_an_unknown_name_is_refused(module):
    found = importlib.import_module(module)
    with pytest.raises(AttributeError, match=f"'{module}' has no attribute 'nothing'"):
        _ = found.nothing


def test_importing_them_loads_nothing_heavy():
    code = f"import sys, {', '.join(MODULES)}; print({{'torch', 'transformers', 'pydantic', 'aiohttp'}} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_the_names_for_tests_are_those_of_their_package():
    assert testing.__all__ == rlhf_authoring.__all__
    assert testing.make_batch is rlhf_authoring.make_batch
    with pytest.raises(AttributeError, match=r"'rlhf_host\.testing' has no attribute 'nothing'"):
        _ = testing.nothing


@pytest.mark.parametrize("left", ["None", "types.ModuleType('rlhf_authoring')"])
def test_without_the_package_its_names_say_what_to_install(left):
    """A folder that the package has left behind is a module without a file."""
    code = f"import sys, types; sys.modules['rlhf_authoring'] = {left}\nfrom rlhf_host.testing import write_tiny_model"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    way = "pip install -c dist/wheels.txt 'rlhf-host[testing]'"
    said = f"ImportError: rlhf_host.testing.write_tiny_model is in the package rlhf-authoring: {way}\n"
    assert done.stderr.endswith(said), done.stderr
