"""A command that does not exist: what it may mean, and what has to be installed for it."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner

from rlhf_host.cli.main import main
from rlhf_host.plugins.discovery import discover


def rlhf(*words: str):
    return CliRunner().invoke(main, words, prog_name="rlhf")


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("grpo", "'grpo' is an algo: rlhf train --algo grpo --help"),
        ("sft", "'sft' is an algo: rlhf train --algo sft --help"),
        ("train_ppo", "'ppo' is an algo: rlhf train --algo ppo --help"),
        ("plugin", "did you mean 'plugins' or 'plan'?"),
        ("zzz", "rlhf --help lists them"),
    ],
)
def test_unknown_commands(typed, hint):
    done = rlhf(*typed.split())
    assert (done.exit_code, done.stderr) == (2, f"Error: no command {typed.split()[-1]!r}; {hint}\n")


def test_every_plugins_name_is_understood_as_a_command():
    names = {info.name for info in discover() if info.kind in ("algo", "reward", "tracker", "preset", "extension")}
    for name in names - {"file"} - main.installed().keys():
        hint = rlhf(name).stderr.partition("; ")[2].strip()
        command = re.search(r"rlhf (train --.*)", hint)
        assert command is not None, (name, hint)
        assert rlhf(*command[1].split()).exit_code == 0, hint


def test_a_listed_plugin_that_is_not_installed_can_be(monkeypatch):
    monkeypatch.setenv("RLHF_DISABLE_PLUGINS", "rloo")
    said = "'rloo' is an algo that is not installed: pip install -c dist/wheels.txt rlhf-plugin-rloo"
    assert rlhf("rloo").stderr == f"Error: no command 'rloo'; {said}\n"


def test_a_command_that_is_left_out_says_so(monkeypatch):
    monkeypatch.setenv("RLHF_DISABLE_PLUGINS", "translate")
    assert rlhf("translate", "x").stderr == (
        "Error: no command 'translate'; it is left out by --disable or RLHF_DISABLE_PLUGINS\n"
    )


def test_an_option_that_takes_one_value_is_given_once():
    assert rlhf("plugins", "--kind", "algo", "--kind", "reward").stderr == "Error: --kind can be given once\n"
    assert rlhf("view", "--browser", "--no-browser").stderr == "Error: --browser and --no-browser: leave one out\n"
    assert rlhf("plugins", "--kind", "algo", "show", "grpo", "--kind", "algo").exit_code == 0
    again = rlhf("plugins", "check", "kl", "--option", "coef=1", "--option", "coef=2")
    assert (again.exit_code, again.stderr) == (2, "Error: --option coef=2: 'coef' already has a value\n")


def test_where_nothing_explains_words_it_is_told_what_does(monkeypatch):
    monkeypatch.setenv("RLHF_DISABLE_PLUGINS", "rlhf-translate:translate")
    line = "names of other projects are explained after pip install -c dist/wheels.txt rlhf-translate"
    assert rlhf("ls").stderr == f"Error: no command 'ls'; rlhf --help lists them; {line}\n"
    assert rlhf("data", "head").stderr == f"Error: no command 'head'; rlhf data --help lists them; {line}\n"
