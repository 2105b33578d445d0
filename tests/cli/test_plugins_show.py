"""``rlhf plugins show``: one plugin, or all that cannot be used; a process of its own imports them."""

from __future__ import annotations

import pytest
from rlhf_authoring.inspection import look_inside

import rlhf_host
from rlhf_host.plugins.discovery import discover

from ..conftest import JUDGE


def test_without_a_name_each_is_imported_and_those_that_cannot_be_used_are_shown(shop):
    typo = JUDGE.replace("def score", "def scores")
    shop.install("cmd-typo", {"rlhf.rewards": "typo = cmd_typo:Judge"}, {"cmd_typo.py": typo})
    shop.install("cmd-dies", {"rlhf.rewards": "dies = cmd_dies:X"}, {"cmd_dies.py": "import os; os._exit(7)"})
    done = shop.rlhf("plugins", "show", "--kind", "reward", COLUMNS="200")
    text = done.stdout
    rows = [line.split(": ")[:2] for line in text.splitlines() if line.startswith("reward ")]
    broken = {"broken": "broken", "typo": "broken", "dies": "broken", "old": "incompatible", "gone": "missing"}
    assert {name.removeprefix("reward "): status for name, status in rows} == broken
    known = [info for info in discover() if info.kind == "reward"]
    assert text.splitlines()[-1] == f"{len(known) + 1} of {len(known) + 6} plugins can be used"
    assert done.returncode == 1
    assert "broken: importing cmd_broken failed: ModuleNotFoundError: No module named 'no_such_module'" in text
    assert "'scores', which is not a hook; did you mean 'score'?" in text
    assert "broken: importing cmd_dies ended the process with exit code 7" in text


ENGINES = """
from rlhf_host.protocols import EngineTraits
class Bare:
    def __init__(self, options): ...
class E(Bare):
    traits = EngineTraits()
"""


@pytest.mark.parametrize(
    ("group", "value", "problem"),
    [
        ("rlhf.presets", "cmd_pkg:good.yaml", ""),
        ("rlhf.presets", "cmd_pkg:bad.yaml", "bad.yaml: while parsing"),
        ("rlhf.presets", "cmd_pkg:list.yaml", "list.yaml: a preset is a mapping of settings"),
        ("rlhf.engines", "cmd_pkg.engine:E", ""),
        ("rlhf.engines", "cmd_pkg.engine:Bare", "has no traits: see rlhf_host.protocols"),
        ("rlhf.rewards", "cmd_pkg.engine:E", "cmd_pkg.engine:E implements no hook: mark its methods with @hookimpl"),
    ],
)
def test_presets_are_read_and_protocols_need_traits_in_place_of_hooks(here, group, value, problem):
    files = {"good.yaml": "seed: 1", "bad.yaml": "seed: [1", "list.yaml": "[1]", "engine.py": ENGINES}
    here.install("cmd-pkg", {group: f"x = {value}"}, {f"cmd_pkg/{name}": text for name, text in files.items()})
    (info,) = [info for info in discover() if info.distribution == "cmd-pkg"]
    found = look_inside(info).problem
    assert problem in found
    assert bool(found) == bool(problem)


def test_one_import_has_a_deadline(site):
    site.install("cmd-slow", {"rlhf.rewards": "slow = cmd_slow:X"}, {"cmd_slow.py": "import time\ntime.sleep(600)"})
    for words in (["slow", "--deadline", "1"], ["--kind", "reward", "--deadline", "1.5"]):
        shown = site.rlhf("plugins", "show", *words)
        assert shown.returncode == 1
        assert f"broken: importing cmd_slow took longer than {words[-1]} s" in shown.stdout


def test_show_tells_where_it_comes_from_its_hooks_and_options(shop):
    done = shop.rlhf("plugins", "show", "judge", COLUMNS="200")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "reward judge",
        "  from     cmd-good 1.0 (cmd_good:Judge)",
        f"  file     {shop.folder / 'cmd_good.py'}",
        "  summary  Judges answers.",
        f"  API      >=0.10,<0.11 (this is rlhf-host {rlhf_host.__version__})",
        "  status   ok",
        "  hooks    needs, score",
        "  options",
        "    timeout_s  float, default 5.0",
        "        Seconds for one answer",
        "    mode  'strict' | 'loose', required",
    ]


def test_show_lets_an_import_error_be_seen(shop):
    done = shop.rlhf("plugins", "show", "broken")
    assert done.returncode == 1
    assert "status   broken: importing cmd_broken failed" in done.stdout
    assert "Traceback (most recent call last):" in done.stdout
    assert 'cmd_broken.py", line 1' in done.stdout
    assert "ModuleNotFoundError: No module named 'no_such_module'" in done.stdout


def test_show_shows_every_claimant_and_one_by_its_distribution(shop):
    both = shop.rlhf("plugins", "show", "twin").stdout
    assert "from     cmd-left 1.0" in both
    assert "from     cmd-right 1.0" in both
    assert "cmd-left" not in shop.rlhf("plugins", "show", "cmd-right:twin").stdout.split("conflict")[0]


def test_show_of_an_incompatible_plugin_says_so_and_does_not_import_it(shop):
    (shop.folder / "cmd_old.py").write_text("raise SystemExit('imported')")
    done = shop.rlhf("plugins", "show", "old", COLUMNS="200")
    assert done.returncode == 1
    assert "incompatible: cmd-old 1.0 is for rlhf-host <0.9" in done.stdout
    assert "imported" not in done.stdout


def test_show_of_an_unknown_name_gives_the_near_match(shop):
    done = shop.rlhf("plugins", "show", "jugde")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "Error: no plugin named 'jugde' is installed; did you mean 'judge'?\n"
