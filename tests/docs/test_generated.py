"""Generated pages are what the code says, and leave nothing out."""

from __future__ import annotations

import re

import pytest

from rlhf_host.config.flag_names import known_flags
from rlhf_host.plugins.discovery import GROUPS, WITHOUT_OPTIONS
from rlhf_host.plugins.options import describe_options, options_model
from rlhf_host.plugins.selection import load

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


def test_every_command_has_a_page_with_all_of_its_help(generator):
    index = (DOCS / "reference/commands.md").read_text()
    for path in generator.commands.command_paths():
        if not path:
            continue
        shown, page = " ".join(("rlhf", *path)), DOCS / f"reference/commands/{path[0]}.md"
        text = page.read_text()
        assert f"\n{'#' if len(path) == 1 else '##'} {shown}\n" in text
        assert f"[`rlhf {path[0]}`](commands/{path[0]}.md)" in index
        for _, entries in generator.commands.sections(generator.commands.help_text(path)):
            for term, about in entries:
                assert term.split(", ")[0].replace("|", r"\|") in text
                assert " ".join(about.replace("|", r"\|").replace("<", "&lt;").split()) in text


def test_a_help_text_that_cannot_be_read_is_refused(generator):
    with pytest.raises(RuntimeError, match="a line of the section 'Options' is no entry: 'here'"):
        list(generator.commands.sections("Usage: x\n\nOptions:\n  --a  b\nhere\n"))


def test_the_list_of_plugins_has_every_plugin_of_the_project_and_leads_to_its_options(generator):
    text = (DOCS / "reference/plugins/index.md").read_text()
    rows = list(generator.catalogue.published())
    assert {info.kind for info in rows} <= set(GROUPS)
    for info in rows:
        flag = re.escape(generator.catalogue.typed(info))
        ((link, line),) = re.findall(rf"^\| \[`{flag}`\]\(([^)]+)\) \| `{info.distribution}` \| (.+) \|$", text, re.M)
        assert len(line) > 10, f"{info.name} says nothing of itself: {line!r}"
        if info.kind != "command":
            page = (DOCS / "reference/plugins" / link.partition("#")[0]).read_text()
            section = page.partition(f" {{ #{link.partition('#')[2]} }}")[2].partition("\n## ")[0]
            options = [] if info.kind in WITHOUT_OPTIONS else describe_options(options_model(load(info)))
            assert "policy loss" in section or [each.name for each in options if f"| `{each.name}` |" not in section] == []


def test_every_distribution_has_a_page(generator):
    pages = {path.stem for path in (DOCS / "reference/plugins").glob("*.md")} - {"index"}
    assert pages == set(generator.catalogue.folders())


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ('yield Metric("near/miss", x)', ["near/miss"]),
        ('Step(metrics={f"near/{name}": 1.0, "far": 2.0})', ["near/NAME", "far"]),
        ('row.metrics |= {f"near/{n}": v for n, v in own.items()}', ["near/NAME"]),
        ('metrics["near/later"] = 1.0', ["near/later"]),
        ('metrics[f"{prefix}{name}"] = 1.0', []),
        ("def batch_statistics(self):\n    return [Metric('own', x)]", []),
    ],
)
def test_metrics_are_found_in_sources_and_have_a_meaning(generator, tmp_path, source, names):
    (tmp_path / "src").mkdir()
    (tmp_path / "src/a.py").write_text(source)
    (tmp_path / "README.md").write_text("# none\n")
    assert generator.plugins.written_metrics(tmp_path) == names
    if names:
        with pytest.raises(ValueError, match=f"README.md: its table of metrics has no row for {names[0]}"):
            generator.plugins.metrics_of(tmp_path)
    rows = "".join(f"| `{name}` | how near |\n" for name in names)
    (tmp_path / "README.md").write_text(f"# one\n\n| metric | meaning |\n|---|---|\n{rows}")
    assert generator.plugins.metrics_of(tmp_path) == [(f"`{name}`", "how near") for name in names]


def test_pages_that_nothing_generates_any_more_are_out_of_date(generator, tmp_path, monkeypatch):
    monkeypatch.setattr(generator, "ROOT", tmp_path)
    monkeypatch.setattr(generator, "DOCS", tmp_path)
    (tmp_path / "old.md").write_text(generator.NOTE + "# Old\n")
    (tmp_path / "written.md").write_text("# By hand\n")
    assert generator._left([]) == ["old.md"]
