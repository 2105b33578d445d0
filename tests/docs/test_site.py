"""The site builds in strict mode, without a network, and asks nobody else for anything."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from .conftest import DOCS, PAGES, ROOT

LOADED = re.compile(r"<(?:script|img|iframe|source)[^>]*\bsrc=[\"']?([^\"'> ]+)|<link[^>]*\bhref=[\"']?([^\"'> ]+)[^>]*>", re.I)

# No socket can be opened: what is fetched at build time would fail here.
OFFLINE = """
import socket, sys
def refuse(*_, **__):
    raise OSError("the documentation is built without a network")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
from mkdocs.__main__ import cli
sys.argv = ["mkdocs", *sys.argv[1:]]
cli()
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-c", OFFLINE, "build", "--strict", "--site-dir", folder]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_built_and_stands_in_the_navigation(site):
    def flat(items):
        for item in items:
            for value in item.values() if isinstance(item, dict) else [item]:
                yield from flat(value) if isinstance(value, list) else [value]

    entries = list(flat(YAML(typ="safe").load((ROOT / "mkdocs.yml").read_text())["nav"]))
    nav = set(entries)
    assert len(entries) == len(nav), "a page has one place"
    pages = {path.relative_to(DOCS).as_posix() for path in PAGES if path.is_relative_to(DOCS)}
    listed = {page for page in pages if re.match(r"reference/(plugins/(?!index)|commands/)", page)}
    assert nav == pages - listed, (
        "mkdocs.yml lists every page of docs/ but those of single plugins and commands, and nothing else"
    )
    for page in pages:
        html = site / page.removesuffix(".md") / "index.html"
        assert html.is_file() or (site / page.replace(".md", ".html")).is_file() or page.endswith("index.md")


def test_names_and_types_in_tables_are_whole(site):
    """``|`` is shown without the escape that GitHub wants, and a name is never broken in two."""
    html = (site / "reference/functional/index.html").read_text(encoding="utf-8")
    assert "<code>float | None</code>" in html
    assert r"\|" not in "".join(re.findall(r"<code[^>]*>[^<]*</code>", html))
    assert "<code>clip_eps_high</code>" in html
    assert "word-break: normal" in (site / "assets/site.css").read_text(encoding="utf-8")
    assert "assets/site.css" in html
    assert '<span class="name">--train.batch-size</span>' in (site / "reference/names/index.html").read_text(encoding="utf-8")


def test_a_phone_shows_rows_of_wide_tables_below_each_other(site):
    """Tables with sentences are marked, and cells carry their column's head."""
    html = (site / "reference/plugins/rlhf-plugin-ppo/index.html").read_text(encoding="utf-8")
    assert "<table data-stacked>" in html
    assert '<td data-label="default: "><code>1.0</code></td>' in html
    assert "<td><code>gamma</code></td>" in html
    assert "table[data-stacked] td" in (site / "assets/site.css").read_text(encoding="utf-8")


def test_tables_of_figures_stay_tables():
    spec = importlib.util.spec_from_file_location("site_hook", ROOT / "scripts/site.py")
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    row = "<table><tr><th>a</th><th>b</th><th>c</th></tr><tr><td>{}</td><td>{}</td><td></td></tr></table>"
    figures, sentence = row.format("1" * 25, "2" * 25), row.format("1" * 25, "2" * 26)
    assert hook.on_page_content(figures) == figures
    assert '<td data-label="b: ">' in hook.on_page_content(sentence)
    two = sentence.replace("<th>c</th>", "").replace("<td></td>", "")
    assert "data-stacked" in hook.on_page_content(two)
    assert "data-label" not in hook.on_page_content(two), "what the only other column says is plain"


def test_the_front_page_shows_a_learning_curve(site):
    html = (site / "index.html").read_text(encoding="utf-8")
    assert 'src="assets/learning-curve.svg"' in html
    assert "<polyline" in (site / "assets/learning-curve.svg").read_text(encoding="utf-8")


def test_no_page_loads_anything_from_elsewhere(site):
    outside = set()
    for page in site.rglob("*.html"):
        for match in LOADED.finditer(page.read_text(encoding="utf-8")):
            address = match[1] or match[2]
            canonical = 'rel="canonical"' in match[0]
            if re.match(r"(https?:)?//", address) and not canonical:
                outside.add(address)
    for style in site.rglob("*.css"):
        outside |= set(re.findall(r"url\((https?://[^)]+)\)", style.read_text(encoding="utf-8")))
    assert outside == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_pages_speak_of_the_project_alone(page):
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"(?<![\w.])/(tmp|work|home|root)/", text)
    assert text.count("```") % 2 == 0
    assert Path(page).read_bytes().endswith(b"\n")
