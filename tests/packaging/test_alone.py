"""A plugin's wheel, alone with the host's in a clean environment, passes its own tests.

`make test-wheels` does so with every distribution, which takes minutes; `make test` with the first one.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECTS = {path.parent.name: path.parent for path in sorted(ROOT.glob("plugins/*/*/pyproject.toml"))}
CHOSEN = list(PROJECTS) if os.environ.get("RLHF_TEST_WHEELS") == "all" else ["rlhf-plugin-rloo"]


@pytest.mark.parametrize("name", CHOSEN)
def test_a_plugin_alone_with_the_host_passes_its_own_tests(name, wheels, new_environment, tmp_path):
    alone = new_environment(wheels["rlhf-host"], wheels[name])
    listed = json.loads(alone("rlhf", "plugins", "--json", cwd=tmp_path))
    assert {plugin["distribution"] for plugin in listed} == {"rlhf-host", name}
    assert {plugin["status"] for plugin in listed} == {"ok"}
    # A copy, so that nothing of the source tree beside the tests can stand in for what was installed.
    shutil.copytree(PROJECTS[name] / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    alone("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", "tests", cwd=tmp_path)
