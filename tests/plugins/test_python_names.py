"""Names that packages add to ``rlhf_host``: what is wrong with one is told, and takes nothing else down."""

from __future__ import annotations

import importlib
import sys

import pytest

import rlhf_host
from rlhf_host import PluginError


def add(here, distribution, name, source="def added(): return 7\n", **options):
    module = distribution.replace("-", "_")
    here.install(distribution, {"rlhf.python": f"{name} = {module}:added"}, {f"{module}.py": source}, **options)


def test_a_name_is_what_its_package_gives(here):
    add(here, "names-a", "added_by_a")
    assert rlhf_host.added_by_a() == 7


def test_a_package_that_cannot_be_imported_is_named(here):
    add(here, "names-a", "added_by_a", "import no_such_module\n")
    add(here, "names-b", "added_by_b", "added_here = 1\n")
    add(here, "names-c", "added_by_c", requires=("rlhf-host>=1,<2",))
    for name, message in {
        "a": "'added_by_a' from names-a 1.0: importing names_a failed: .*no_such_module",
        "b": "'added_by_b' from names-b 1.0: names_b has no 'added'",
        "c": "'added_by_c' from names-c 1.0: .*>=1,<2",
    }.items():
        with pytest.raises(PluginError, match=message):
            getattr(rlhf_host, f"added_by_{name}")
    assert not hasattr(rlhf_host, "added_by_nobody")
    assert "added_by_c" in here.rlhf("plugins").stdout


def test_two_packages_with_one_name_are_told_apart_by_leaving_one_out(here, monkeypatch):
    add(here, "names-a", "added_twice")
    add(here, "names-b", "added_twice", "def added(): return 8\n")
    with pytest.raises(PluginError, match="names-a and names-b both add 'added_twice'"):
        _ = rlhf_host.added_twice
    monkeypatch.setenv("RLHF_DISABLE_PLUGINS", "names-a:added_twice")
    assert rlhf_host.added_twice() == 8


def test_the_hosts_own_names_stay(here, monkeypatch):
    add(here, "names-a", "train")
    add(here, "names-b", "systems")
    monkeypatch.delattr(rlhf_host, "systems", raising=False)
    with pytest.raises(AttributeError):  # so that an import looks for the module
        rlhf_host.__getattr__("systems")
    assert rlhf_host.train is importlib.import_module("rlhf_host.api").train
    listed = " ".join(here.rlhf("plugins").stdout.split())
    assert listed.count("rlhf_host has this name itself") == 2
    assert "names_a" not in sys.modules
