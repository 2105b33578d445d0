"""Plugins as pip would have left them: a module and its metadata in a folder on the path."""

from __future__ import annotations

import importlib
import sys

import pytest

from rlhf_host.plugins.discovery import GROUPS


@pytest.fixture
def install(tmp_path, monkeypatch):
    """``install(kind, source)`` makes the plugin ``made_up``, of the class ``Plugin`` in ``source``."""
    site = tmp_path / "site"
    site.mkdir()
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(site))

    def make(kind, source, *, distribution="made-up-plugin", requires="rlhf-host>=0.10,<0.11"):
        if "from rlhf_kernels import" in source:
            pytest.importorskip("rlhf_kernels")
        module = distribution.replace("-", "_")
        info = site / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\nRequires-Dist: {requires}\n\nAbout.\n"
        )
        (info / "entry_points.txt").write_text(f"[{GROUPS[kind]}]\nmade_up = {module}:Plugin\n")
        (site / f"{module}.py").write_text(source)
        importlib.invalidate_caches()
        return site

    yield make
    for name in set(sys.modules) - before:
        if str(site) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
