"""Real installed distributions: folders with a module and the metadata that pip would have left."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import rlhf_host

ROOT = Path(rlhf_host.__file__).parent.parent


class Site:
    """A folder that stands for site-packages."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def install(
        self, distribution, entry_points, modules=None, requires=("rlhf-host>=1,<2",), version="1.0", summary="A summary."
    ):
        """``entry_points``: group → ``name = module:attribute`` lines; ``modules``: path → source."""
        info = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        needs = "".join(f"Requires-Dist: {line}\n" for line in requires)
        head = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\nSummary: {summary}\n"
        (info / "METADATA").write_text(f"{head}{needs}\nLong description.\n")
        points = "".join(f"[{group}]\n{lines}\n\n" for group, lines in entry_points.items())
        (info / "entry_points.txt").write_text(points)
        for path, source in (modules or {}).items():
            file = self.folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(textwrap.dedent(source))
        importlib.invalidate_caches()
        return info

    def rlhf(self, *arguments, python=(), stdout=subprocess.PIPE, **environment):
        """The real command line in a process of its own, this folder on its path."""
        return subprocess.run(
            [sys.executable, *python, "-m", "rlhf_host.cli.main", *arguments],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(self.folder), str(ROOT)]), "COLUMNS": "80", **environment},
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=120,
        )

    def listed(self, *arguments):
        """``rlhf plugins --json``: name → object of what the test installed."""
        done = self.rlhf("plugins", "--json", *arguments)
        assert done.returncode == 0, done.stderr
        return {row["name"]: row for row in json.loads(done.stdout) if row["distribution"].startswith("cmd-")}


@pytest.fixture
def site(tmp_path):
    return Site(tmp_path / "site")


@pytest.fixture
def here(site, monkeypatch):
    """The same, importable in this process too."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(site.folder))
    yield site
    for name in set(sys.modules) - before:
        if str(site.folder) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
