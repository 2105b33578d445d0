"""Generated pages are what the code says, and leave nothing out."""

from __future__ import annotations

import re

from rlhf_host.config.flag_names import known_flags
from rlhf_host.plugins.discovery import GROUPS

from .conftest import DOCS, GENERATED


def test_generated_pages_and_the_list_of_plugins_are_current(generator):
    assert generator.outdated() == [], "run: python scripts/generate_docs.py"


def test_generated_pages_say_so(generator):
    assert all(text.startswith(GENERATED) for text in generator.pages().values())


def test_every_setting_has_a_type_a_default_and_a_description(generator):
    text = (DOCS / "reference/configuration.md").read_text()
    rows = re.findall(r"^\| `--([\w.*-]+)` \| (.*?) \| (.*?) \| (.*) \|$", text, re.M)
    shown = {name: (kind, default, about) for name, kind, default, about in rows}
    settings = {name for name in known_flags() if not name.startswith("eval.data.")}
    roles = {name for name in settings if name.partition(".")[0] in ("critic", "reference", "reward-model", "teacher")}
    plugins = {"algo", "agent", "engine", "backend", "runtime", "sync", "kernels", "reward", "with", "tracker", "eval.reward"}
    settings -= roles | plugins | {"data", "eval.data"}  # repeatable, with settings of their own
    assert settings - shown.keys() == set()
    silent = [name for name in settings if not all(shown[name])]
    assert silent == [], "write Field(default, description=...) in config/schema.py"


def test_every_command_has_its_help(generator):
    text = (DOCS / "reference/commands.md").read_text()
    for path in generator.commands.command_paths():
        assert f"\n## {' '.join(('rlhf', *path))}\n" in text


def test_the_catalogue_has_every_plugin_of_the_project(generator):
    text = (DOCS / "catalogue.md").read_text()
    rows = list(generator.catalogue.published())
    assert {info.kind for info in rows} <= set(GROUPS)
    for info in rows:
        flag = generator.catalogue.typed(info)
        (line,) = re.findall(rf"^\| `{re.escape(flag)}` \| `{info.distribution}` \| (.+) \|$", text, re.M)
        assert len(line) > 10, f"{info.name} says nothing of itself: {line!r}"
