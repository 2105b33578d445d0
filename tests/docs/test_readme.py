"""The README: short, and true."""

from __future__ import annotations

import re
import subprocess
import sys

from rlhf_host.plugins.discovery import GROUPS

from .conftest import DOCS, ROOT, blocks

README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")
RLOO = ROOT / "plugins/builtin_algos/rlhf-plugin-rloo/src/rlhf_plugin_rloo/__init__.py"


def test_it_is_short_and_begins_with_the_first_step():
    assert len(TEXT.encode()) <= 6000
    assert blocks(README)[0].body.splitlines()[-1].startswith("make quickstart")


def test_its_links_lead_to_files():
    paths = {link for link in re.findall(r"\]\(([^)#]+)", TEXT) if "://" not in link}
    assert len(paths) > 10
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_the_plugin_that_it_shows_is_rloo():
    shown = [block.body for block in blocks(README) if block.language == "python"]
    assert RLOO.read_text(encoding="utf-8") in shown


def test_it_counts_the_kinds_of_plugins():
    (count,) = re.findall(r"(\d+) kinds", TEXT)
    named = re.findall(r"^\| (\w+) \| `(rlhf\.\w+)` \|", (DOCS / "plugins/index.md").read_text(), re.M)
    assert int(count) == len(named) == len(GROUPS)


def test_its_python_learns(tmp_path):
    script = tmp_path / "first.py"
    script.write_text(next(block.body for block in blocks(README) if "rlhf_host.train(" in block.body))
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *_, reward, answers = done.stdout.splitlines()
    assert float(reward) > 0.85
    assert re.fullmatch(r"\[\['\d+'\]\]", answers)
