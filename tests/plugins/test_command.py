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

from ..conftest import ENVIRONMENT, ROOT

HEAVY = {"torch", "transformers", "datasets", "ray", "vllm", "deepspeed", "numpy", "pydantic"}


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


def test_kind_limits_the_list(shop):
    assert set(shop.listed("--kind", "algo")) == {"twin"}
    assert set(shop.listed("--kind", "runtime")) == set()


DOCUMENTED = """
class Judge:
    '''Judges
    answers, such as ``42``. More.'''
"""


def test_in_a_pipe_the_list_has_a_line_for_each_plugin(shop):
    shop.install(
        "cmd-plugin-with-a-long-name",
        {"rlhf.weight_sync": "a_rather_long_plugin_name = cmd_good:Judge"},
        summary="It goes on and on, as summaries on package indexes are wont to do, without an end in sight.",
    )
    done = shop.rlhf("plugins")
    assert done.returncode == 0
    found, told = json.loads(shop.rlhf("plugins", "--json").stdout), done.stdout.splitlines()
    assert "\x1b" not in done.stdout
    assert [line.split()[0] for line in told if line and not line.startswith(" ")] == list(
        dict.fromkeys(own["kind"] for own in found)
    )
    assert sum(line.startswith("  judge ") for line in told) == 1
    assert "conflict: cmd-left and cmd-right both provide it" in done.stdout
    (long,) = (line for line in told if line.startswith("  a_rather_long_plugin_name "))
    assert "It goes on and on" in long


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
