"""Checks of commands: what ``rlhf --help`` says of one, and that mistakes on its line are refused as everywhere."""

from __future__ import annotations

import click
from click.testing import CliRunner, Result

from rlhf_authoring.contracts.subject import Subject, check, expect
from rlhf_host import UserError
from rlhf_host.commands import unreachable
from rlhf_host.installed import about


def _run(subject: Subject, *words: str) -> Result:
    names = ["-h", "--help"]  # as under rlhf: click keeps a command's first help option
    return CliRunner().invoke(
        subject.value, words, help_option_names=names, prog_name=f"rlhf {subject.info.name.replace('.', ' ')}"
    )


@check()
def help_begins_with_what_it_does(subject: Subject) -> None:
    """The command's docstring is a sentence that source alone shows: ``rlhf --help`` lists it and imports nothing."""
    said = about(subject.info)
    text = (subject.value.help or "").strip()
    expect(text, f"{subject.info.value} has no docstring: say in one line what it does")
    expect(
        said != subject.info.summary,
        f"the docstring of {subject.info.value} is not where its entry point says: define it there",
    )
    expect(len(said) <= 160, f"its first sentence has {len(said)} characters, and is a line of rlhf --help: shorten it")


@check()
def it_can_be_reached(subject: Subject) -> None:
    """``rlhf NAME`` runs the command; of one called ``GROUP.NAME``, ``GROUP`` is a ``CommandGroup``."""
    problem = unreachable(subject.info)
    expect(not problem, problem)


@check()
def help_is_shown(subject: Subject) -> None:
    """``--help`` shows the command's usage and ends with exit code 0."""
    done = _run(subject, "--help")
    expect(done.exit_code == 0, f"--help ended with exit code {done.exit_code}: {done.output[-500:]}{done.exception or ''}")
    expect("Usage:" in done.output, f"--help shows no usage: {done.output[:500]}")


@check()
def unknown_flags_are_refused(subject: Subject) -> None:
    """An option that does not exist ends the command with exit code 2 and a message: a typo must not be ignored."""
    done = _run(subject, "--no-such-option")
    refused = done.exit_code == 2 or isinstance(done.exception, UserError)
    expect(refused, f"--no-such-option ended with exit code {done.exit_code}, not 2: {done.output[-500:]}")


@check()
def flags_are_described(subject: Subject) -> None:
    """Every option has a help text: it is all that ``--help`` can show."""
    options = [option for option in subject.value.params if isinstance(option, click.Option) and not option.hidden]
    silent = ", ".join(option.opts[0] for option in options if not (option.help or "").strip())
    expect(not silent, f"no help text: {silent}; write click.option(..., help=...)")
