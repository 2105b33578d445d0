"""The contract suite of commands against good ones, and against ones that break each rule on purpose."""

from __future__ import annotations

import pytest
from rlhf_authoring import run_contract
from rlhf_authoring.contracts.suite import COMMAND, all_checks

from rlhf_host.plugins.discovery import discover

GOOD = '''
import click


@click.command()
@click.option("--count", default=1, help="How often.")
def Plugin(count):
    """Greet the reader."""
    click.echo("hello\\n" * count)
'''

BROKEN = [
    ("entry_point_loads", "@click.command()", "# "),
    ("import_is_light", "import click\n", "import click, torch\n"),
    ("help_begins_with_what_it_does", '"""Greet the reader."""', ""),
    ("help_begins_with_what_it_does", "Greet the reader.", "Greet " + "the reader " * 20 + "."),
    ("help_is_shown", "@click.command()", "@click.command(add_help_option=False)"),
    ("unknown_flags_are_refused", "@click.command()", '@click.command(context_settings={"ignore_unknown_options": True})'),
    ("flags_are_described", ', help="How often."', ""),
]

IN_METADATA = {"entry_point_is_unique", "host_dependency_is_bounded", "it_can_be_reached"}
"""Broken for every kind in ``test_contracts``, and by a name in ``tests/cli/test_outside_commands.py``."""


def failed(results):
    return {result.name for result in results if result.passed is False}


def test_a_good_command_passes_every_check(install):
    install("command", GOOD)
    results = run_contract("command", "made_up")
    assert [result for result in results if not result.passed] == []
    assert {result.name for result in results} == {check.name for check in all_checks(COMMAND)}


@pytest.mark.parametrize(("check", "old", "new"), BROKEN)
def test_each_check_reports_the_command_that_breaks_it(check, old, new, install):
    assert old in GOOD
    source = GOOD.replace(old, new)
    if check == "unknown_flags_are_refused":
        source = source.replace("def Plugin(count)", "def Plugin(count, rest)").replace(
            "@click.option", '@click.argument("rest", nargs=-1)\n@click.option'
        )
    install("command", source)
    results = run_contract("command", "made_up")
    assert failed(results) == {check}
    assert all(result.message for result in results if not result.passed)


def test_every_check_of_commands_is_broken_by_one():
    assert {check for check, _, _ in BROKEN} | IN_METADATA == {check.name for check in all_checks(COMMAND)}


@pytest.mark.parametrize(
    "name", [info.name for info in discover() if info.kind == "command" and info.distribution == "rlhf-host"]
)
def test_the_hosts_own_commands_pass(name, monkeypatch):
    from rlhf_authoring.contracts import suite

    monkeypatch.setattr(suite, "CHECKS", [check for check in all_checks() if check.name != "import_is_light"])
    assert [result for result in run_contract("command", name) if not result.passed] == []
