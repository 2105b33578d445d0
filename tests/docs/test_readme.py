"""The README, short and true; and a newcomer's first hour, typed as the first page says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from rlhf_host.plugins.discovery import GROUPS

from ..scripts_as_modules import load_script
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


def test_the_first_hour_goes_as_the_page_says(tmp_path):
    """A reward in a file, trained in a terminal, interrupted by Ctrl-C and resumed; then its answers under another reward."""
    terminal = load_script("scripts/screen.py")
    (reward,) = [block.body for block in blocks(DOCS / "getting-started.md") if block.title == "close.py"]
    (tmp_path / "close.py").write_text(reward)
    section = (DOCS / "getting-started.md").read_text().partition("## A reward of your own")[2].partition("\n## ")[0]
    train, resume, replay = re.findall(r"^rlhf .*$", section, re.M)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "HOME": str(tmp_path), "PATH": path, "TERM": "xterm-256color", "HF_HUB_OFFLINE": "1"}

    code, lines = terminal.run(train, tmp_path, environment, "step  3/30")
    assert (code, [line for line in lines if line][-1].strip()) == (130, "rlhf train --resume runs/close")
    code, lines = terminal.run(resume, tmp_path, environment)
    assert code == 0, lines
    rows = [json.loads(line) for line in (tmp_path / "runs/close/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "reward/mean" in row] == list(range(1, 31))
    assert rows[-1]["eval/reward/mean"] > rows[0]["eval/reward/mean"] + 0.1
    code, lines = terminal.run(replay, tmp_path, environment)
    assert code == 0, lines
    assert any(re.match(r"reward mean +0\.\d+ → 0\.\d+", line) for line in lines), lines
