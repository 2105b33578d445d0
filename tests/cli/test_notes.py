"""Packages say what they know of a plugin that is shown: entry points in ``rlhf.notes``, asked by ``plugins show`` alone."""

from __future__ import annotations

import pytest
from rlhf_authoring.commands.show import notes

from rlhf_host.plugins.discovery import discover


def install(site, name, source):
    module = name.replace("-", "_")
    site.install(name, {"rlhf.notes": f"{name} = {module}:note"}, {f"{module}.py": source})


@pytest.fixture
def shown():
    return next(info for info in discover() if info.name == "jsonl")


def test_lines_of_all_packages_and_the_error_of_one_that_fails(here, shown):
    install(here, "note-b", "def note(info):\n    return [f'{info.kind} {info.name}', 'twice']\n")
    install(here, "note-a", "def note(info):\n    raise ValueError('broken')\n")
    said = list(notes(shown))
    assert said[-3:] == ["note 'note-a' from note-a 1.0 failed: ValueError: broken", "tracker jsonl", "twice"]
    assert not [info for info in discover(disabled=True) if info.distribution.startswith("note-")]


def test_show_prints_them_and_a_list_does_not_import_them(site):
    install(site, "note-a", "print('imported')\ndef note(info):\n    return ['kept since 1999']\n")
    assert "note     kept since 1999\n" in site.rlhf("plugins", "show", "jsonl").stdout
    assert "imported" not in site.rlhf("plugins").stdout
