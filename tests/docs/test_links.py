"""Links between files lead somewhere: of pages, of READMEs, and from every plugin's README to its page of the reference."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from .conftest import DOCS, PAGES, ROOT

READMES = sorted(
    {*ROOT.glob("plugins/*/*/README.md"), *ROOT.glob("examples/**/*.md"), *ROOT.glob("*.md"), *ROOT.glob(".github/**/*.md")}
)
LINK = re.compile(r"(?<!`)\[[^\]]*\]\((?P<to>[^)\s]+)\)|<(?:img|a)[^>]*(?:src|href)=\"(?P<html>[^\"]+)\"")


def targets(file: Path) -> list[str]:
    """Returns the links of a file to other files, without what is shown as code."""
    text = re.sub(r"^(```+).*?^\1", "", file.read_text(encoding="utf-8"), flags=re.M | re.S)
    text = re.sub(r"(?m)^(?:    .*\n)+", "", text) if file.name == "README.md" else text
    found = [
        match["to"] or match["html"]
        for match in LINK.finditer(re.sub(r"`[^`\n]*`", lambda code: code[0].replace("](", "] ("), text))
    ]
    return [to.partition("#")[0] for to in found if not re.match(r"[a-z]+:|#", to)]


@pytest.mark.parametrize("folder", ["docs", "READMEs"])
def test_every_link_to_a_file_leads_to_one(folder):
    files = [page for page in PAGES if page.is_relative_to(DOCS)] if folder == "docs" else READMES
    found = [(file, to) for file in files for to in targets(file)]
    assert len(found) > 20
    assert [f"{file.relative_to(ROOT)}: {to}" for file, to in found if not (file.parent / to).exists()] == []


@pytest.mark.parametrize("readme", sorted(ROOT.glob("plugins/*/*/README.md")), ids=lambda path: path.parent.name)
def test_every_plugins_readme_leads_to_its_page(readme):
    assert (
        f"https://github.com/rlhf-host/rlhf-host/blob/main/docs/reference/plugins/{readme.parent.name}.md" in readme.read_text()
    )


def test_no_row_of_a_table_is_on_a_page_twice():
    """Headings of tables are."""
    found = []
    for page in (page for page in PAGES if "reference" not in page.parts):
        lines = page.read_text(encoding="utf-8").splitlines()
        rows = [line for line, below in pairwise([*lines, ""]) if line.startswith("| ") and not below.startswith("|--")]
        found += [f"{page.name}: {row}" for row, times in Counter(rows).items() if times > 1 and len(row) > 60]
    assert found == []


def test_no_file_links_to_a_page_of_ours_that_is_not_published():
    ours = re.compile(r"https?://(?:pypi\.org/project/rlhf-|rlhf-host\.readthedocs\.)[^\s)>\"']*")
    files = [*PAGES, *READMES, *ROOT.glob("plugins/*/*/pyproject.toml"), ROOT / "pyproject.toml"]
    assert {f"{file.relative_to(ROOT)}: {match[0]}" for file in files for match in ours.finditer(file.read_text())} == set()


@pytest.mark.parametrize("page", ["architecture.md", "contributing.md"])
def test_files_that_pages_of_the_project_name_are_there(page):
    named = set(re.findall(r"`(?:python )?([\w/.-]+\.(?:py|pyi|toml|json|txt))`", (DOCS / page).read_text()))
    folders = ("rlhf_host", "plugins", "scripts", "tests", "benchmarks", "constraints")
    there = [path for folder in folders for path in (ROOT / folder).rglob("*.*") if path.is_file()]
    ends = {"/".join(path.parts[-depth:]) for path in there for depth in range(1, 8)}
    assert len(named) > 8
    assert named - ends == set()
