"""``rlhf`` and ``rlhf plugins``, by the real command line and real metadata."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import rlhf_host
from rlhf_host.cli.plugins import FIELDS
from rlhf_host.plugins.about import about
from rlhf_host.plugins.discovery import discover
from rlhf_host.plugins.verify import look_inside

from ..conftest import ENVIRONMENT, ROOT

HEAVY = {"torch", "transformers", "datasets", "ray", "vllm", "deepspeed", "numpy", "pydantic"}

GOOD = """
from typing import Literal
from pydantic import BaseModel, Field
from rlhf_host import hookimpl

class Judge:
    class Options(BaseModel):
        timeout_s: float = Field(5.0, description="Seconds for one answer")
        mode: Literal["strict", "loose"]

    def __init__(self, options): ...

    @hookimpl
    def score(self, trajectories): ...

    @hookimpl
    def needs(self): ...
"""


@pytest.fixture
def shop(site):
    """One plugin of each status."""
    site.install("cmd-good", {"rlhf.rewards": "judge = cmd_good:Judge"}, {"cmd_good.py": GOOD}, summary="Judges answers.")
    site.install("cmd-left", {"rlhf.algos": "twin = cmd_left:X"}, {"cmd_left.py": ""}, requires=[])
    site.install("cmd-right", {"rlhf.algos": "twin = cmd_right:X"}, {"cmd_right.py": ""}, requires=["rlhf-host"])
    site.install("cmd-old", {"rlhf.rewards": "old = cmd_old:X"}, {"cmd_old.py": ""}, requires=["rlhf-host<0.9"])
    site.install("cmd-gone", {"rlhf.rewards": "gone = cmd_gone:X"})
    site.install("cmd-broken", {"rlhf.rewards": "broken = cmd_broken:X"}, {"cmd_broken.py": "import no_such_module\n"})
    return site


def test_json_is_a_list_of_objects_with_these_keys(shop):
    row = shop.listed()["judge"]
    assert tuple(row) == FIELDS == ("kind", "name", "distribution", "version", "api", "status", "summary")
    assert list(row.values()) == ["reward", "judge", "cmd-good", "1.0", ">=0.10,<0.11", "ok", "Judges answers."]


def test_status_is_judged_without_importing(shop):
    statuses = {name: (row["status"], row["api"]) for name, row in shop.listed().items()}
    assert statuses.pop("twin")[0] == "conflict"
    assert statuses == {
        "judge": ("ok", ">=0.10,<0.11"),
        "old": ("incompatible", "<0.9"),
        "gone": ("missing", ">=0.10,<0.11"),
        "broken": ("ok", ">=0.10,<0.11"),
    }


def test_verify_imports_each_and_finds_the_broken(shop):
    typo = GOOD.replace("def score", "def scores")
    shop.install("cmd-typo", {"rlhf.rewards": "typo = cmd_typo:Judge"}, {"cmd_typo.py": typo})
    shop.install("cmd-dies", {"rlhf.rewards": "dies = cmd_dies:X"}, {"cmd_dies.py": "import os; os._exit(7)"})
    text = shop.rlhf("plugins", "--verify", "--kind", "reward", COLUMNS="200").stdout
    statuses = {line.split()[1]: line.split()[4] for line in text.splitlines() if " cmd-" in line and line.startswith("reward")}
    expected = {"judge": "ok", "old": "incompatible", "gone": "missing", "broken": "broken", "typo": "broken", "dies": "broken"}
    assert statuses == expected
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


def test_verify_and_show_have_a_deadline(site):
    site.install("cmd-slow", {"rlhf.rewards": "slow = cmd_slow:X"}, {"cmd_slow.py": "import time\ntime.sleep(600)"})
    assert site.listed("--verify", "--deadline", "1.5", "--kind", "reward")["slow"]["status"] == "broken"
    shown = site.rlhf("plugins", "show", "slow", "--deadline", "1")
    assert shown.returncode == 1
    assert "broken: importing cmd_slow took longer than 1 s" in shown.stdout


def test_kind_limits_the_list(shop):
    assert set(shop.listed("--kind", "algo")) == {"twin"}
    assert set(shop.listed("--kind", "runtime")) == set()


DOCUMENTED = """
class Judge:
    '''Judges
    answers, such as ``42``. More.'''
"""


def test_the_table_has_a_line_for_each_plugin_that_works_and_fits_80_columns(shop):
    shop.install(
        "cmd-plugin-with-a-long-name",
        {"rlhf.weight_sync": "a_rather_long_plugin_name = cmd_good:Judge"},
        summary="It goes on and on, as summaries on package indexes are wont to do, without an end in sight.",
    )
    done = shop.rlhf("plugins")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert max(len(line) for line in lines) <= 80
    assert "\x1b" not in done.stdout
    assert lines[0].split() == ["KIND", "NAME", "ABOUT"]
    names = [line.split()[1] for line in lines[1:] if not line.startswith("    ")]
    assert names.count("judge") == 1
    assert len(names) == len(json.loads(shop.rlhf("plugins", "--json").stdout))
    assert "conflict: cmd-left and cmd-right both provide it" in " ".join(done.stdout.split())
    assert any(line.endswith("…") and "It goes on" in line for line in lines)
    wide = shop.rlhf("plugins", "--kind", "reward", COLUMNS="200").stdout.splitlines()
    assert wide[0].split() == ["KIND", "NAME", "VERSION", "API", "STATUS", "DISTRIBUTION", "ABOUT"]
    row = next(line for line in wide if line.split()[1] == "judge")
    assert row.split(maxsplit=6) == ["reward", "judge", "1.0", ">=0.10,<0.11", "ok", "cmd-good", "Judges answers."]


@pytest.mark.parametrize(
    ("value", "files", "said"),
    [
        ("cmd_doc:Judge", {"cmd_doc.py": DOCUMENTED}, "Judges answers, such as `42`."),
        ("cmd_doc:Judge", {"cmd_doc/__init__.py": "from .own import Judge", "cmd_doc/own.py": DOCUMENTED}, "Judges answers"),
        ("cmd_doc:Other", {"cmd_doc.py": "from cmd_own import Judge as Other", "cmd_own.py": DOCUMENTED}, "Judges answers"),
        ("cmd_doc:Judge", {"cmd_doc.py": '"""A module. More."""\nclass Judge: ...'}, "A module."),
        ("cmd_doc:make", {"cmd_doc.py": '"""A module."""\nmake = object'}, "A module."),
        ("cmd_doc:Judge", {"cmd_doc.py": "class Judge: ..."}, "A summary."),
        ("cmd_doc:Judge", {"cmd_doc.py": "class Judge:"}, "A summary."),
    ],
)
def test_what_a_plugin_does_is_read_from_its_docstring_without_importing_it(here, value, files, said):
    here.install(
        "cmd-doc", {"rlhf.rewards": f"doc = {value}"}, {name: f"{text}\nraise SystemExit" for name, text in files.items()}
    )
    (info,) = [info for info in discover() if info.distribution == "cmd-doc"]
    assert about(info).startswith(said)


def test_what_a_preset_is_is_its_first_comment(here):
    here.install(
        "cmd-doc",
        {"rlhf.presets": "mine = cmd_doc:mine.yaml"},
        {"cmd_doc/mine.yaml": "# A recipe (2025),\n# for sums. More.\nseed: 1"},
    )
    (info,) = [info for info in discover() if info.distribution == "cmd-doc"]
    assert about(info) == "A recipe (2025), for sums."


def test_every_plugin_of_the_project_says_what_it_does():
    own = [info for info in discover() if info.distribution == "rlhf-host" or info.distribution.startswith("rlhf-")]
    assert len(own) > 40
    assert {info.name for info in own if info.kind != "preset" and not len(about(info)) > 20} == set()


# --- show ---------------------------------------------------------------------------------------


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


# --- the command itself -------------------------------------------------------------------------


LIGHT = (
    *(["--help"], ["--version"], ["doctor", "--help"], ["completion", "fish"]),
    *(["plugins"], ["plugins", "--json"], ["plugins", "--help"], ["plugins", "--disable", "judge"]),
    *(["plugins", command, "--help"] for command in ("show", "check", "bench", "install", "uninstall")),
    ["plugins", "install", "--dry-run", "rloo"],
)
LOADED = """
import json, sys
from click.testing import CliRunner
from rlhf_host.cli.main import main
for arguments in json.loads(sys.argv[1]):
    done = CliRunner().invoke(main, arguments)
    print(json.dumps([arguments, done.exit_code, sorted({name.partition(".")[0] for name in sys.modules})]))
"""


def test_no_heavy_module_and_no_plugin_is_imported(shop):
    """By commands one after the other in a new interpreter: the first that imports one is named."""
    environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(shop.folder), str(ROOT)])}
    command = [sys.executable, "-c", LOADED, json.dumps(LIGHT)]
    done = subprocess.run(command, env=environment, cwd=shop.folder, capture_output=True, text=True, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [arguments for arguments, _, _ in rows] == list(LIGHT)
    for arguments, code, imported in rows:
        assert code == 0, arguments
        assert not {*imported} & {*HEAVY, "cmd_good", "cmd_broken", "cmd_left"}, arguments


def test_twenty_distributions_one_broken_and_one_slow_do_not_matter(site):
    for number in range(20):
        code = {0: "raise RuntimeError", 1: "import time; time.sleep(600)"}.get(number, "import torch")
        site.install(f"cmd-{number}", {"rlhf.rewards": f"r{number} = cmd_{number}:X"}, {f"cmd_{number}.py": code})
    assert [row["status"] for row in site.listed().values()] == ["ok"] * 20


def test_help_lists_the_commands_and_version_is_the_packages(site):
    done = site.rlhf("--help")
    assert done.stdout.startswith("Usage: rlhf [OPTIONS] COMMAND [ARGS]...")
    for command in ("train", "eval", "plugins"):
        assert f"\n  {command} " in done.stdout
    assert site.rlhf_process("--version").stdout == f"rlhf, version {rlhf_host.__version__}\n"


def test_an_unknown_command_gets_its_near_match(site):
    done = site.rlhf("plugin")
    assert (done.returncode, done.stderr) == (2, "Error: no command 'plugin'; did you mean 'plugins' or 'plan'?\n")


@pytest.mark.parametrize(
    ("raised", "code", "message"),
    [
        ("UserError('bad.yaml:3: no key')", 2, "Error: bad.yaml:3: no key\n"),
        ("PluginError('no such reward')", 2, "Error: no such reward\n"),
        ("RunError('rewards fail')", 1, "Error: rewards fail\n"),
        ("KeyboardInterrupt", 130, "Interrupted.\n"),
    ],
)
def test_errors_become_a_message_and_an_exit_code_without_a_traceback(site, raised, code, message):
    source = f"import click\nfrom rlhf_host import *\n@click.command()\ndef fail():\n    raise {raised}\n"
    site.install("cmd-failing", {"rlhf.commands": "fail = cmd_failing:fail"}, {"cmd_failing.py": source})
    done = site.rlhf("fail")
    assert (done.returncode, done.stdout, done.stderr) == (code, "", message)


@pytest.mark.skipif(os.name == "nt", reason="pipes close otherwise there")
@pytest.mark.parametrize("arguments", [["plugins"], ["plugins", "--json"], ["plugins", "show", "judge"], ["--help"]])
def test_a_closed_pipe_is_no_traceback(shop, arguments):
    read, write = os.pipe()
    os.close(read)  # what `| head` does, at the worst moment
    try:
        done = shop.rlhf_process(*arguments, stdout=write)
    finally:
        os.close(write)
    assert done.stderr == ""
