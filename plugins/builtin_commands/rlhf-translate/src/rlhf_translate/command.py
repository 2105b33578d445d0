"""``rlhf translate``: another project's command line or configuration as ours."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from rlhf_host import UserError
from rlhf_host.commands import rlhf, visible, write_file
from rlhf_host.settings import MANY
from rlhf_translate.commands import find_commands
from rlhf_translate.translation import Translation
from rlhf_translate.translation import translate as translated
from rlhf_translate.write import UNSET, described, file_text, to_do, version_lines

HELP_GROUP = "Train"

SHOWN = 30
"""Maximum number of options without a counterpart on standard error."""


@click.command()
@click.argument("file", metavar="FILE|-", type=click.Path(path_type=Path))
@click.option(
    "--from",
    "origin",
    metavar="PROJECT[:METHOD][==VERSION]",
    help="Whose the file is, and of which version, where it does not say: openrlhf==0.9.3, trl:grpo, verl.",
)
@click.option(
    "--set", "values", metavar="NAME=VALUE", multiple=True, help="A variable that the script does not set; may be repeated."
)
@click.option("--processes", type=int, metavar="N", help="How many processes start the program, where the file does not say.")
@click.option(
    "--output", "-o", metavar="FILE.yaml", type=click.Path(path_type=Path, dir_okay=False), help="Default: standard output."
)
def translate(file: Path, origin: str | None, values: tuple[str, ...], processes: int | None, output: Path | None) -> None:
    """Turn a command line of OpenRLHF, TRL or verl, or a configuration of verl or TRL, into a file for rlhf train.

    FILE is a shell script or a Python script of TRL, which are read and not run, or a YAML file; - is a shell script on
    standard input. Comments of the result say
    where each setting comes from, which defaults differ, and which options have no counterpart here. SET THIS stands where the
    file gives no value.
    """
    if output is not None and not output.parent.is_dir():
        raise UserError(f"--output {output}: there is no directory {output.parent}")
    text = _piped() if str(file) == "-" else None
    file = file if text is None else Path("standard input")
    commands, others = find_commands(file, origin, dict(map(_variable, values)), processes, text)
    places = _places(output, len(commands))
    if output is not None:
        _refuse_existing(places)
    for line in others:
        click.echo(visible(line), err=True)
    results = [translated(command, str(file)) for command in commands]
    texts = [file_text(result, str(file)) for result in results]
    if output is None:
        click.echo("---\n".join(texts), nl=False)
    for result, text, place in zip(results, texts, places, strict=True):
        if output is not None:
            write_file(place, text.encode())
        for line in _report(result, place, file, output is not None):
            click.echo(line, err=True)


def _piped() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError("standard input: not UTF-8 text") from error


def _refuse_existing(places: Sequence[Path]) -> None:
    for place in places:
        if place.exists() or place.is_symlink():
            raise UserError(f"{place} exists: remove it, or choose another --output")


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UserError(f"--set {text}: should be NAME=VALUE")
    return name, value


def _places(output: Path | None, number: int) -> Sequence[Path]:
    """Returns a file for each command."""
    place = output or Path("run.yaml")
    return [place] if number == 1 else [place.with_stem(f"{place.stem}-{count}") for count in range(1, number + 1)]


def _report(result: Translation, place: Path, file: Path, wrote: bool) -> Iterator[str]:
    command, options = result.command, result.of_options
    lost, needless = [note for note in options if note.lost], [note for note in options if note.needs_none]
    asked = [note for note in options if note.asks]
    translated = len(options) - len(lost) - len(needless) - len(asked)
    defaults = sum(not any(note.option.line for note in result.causes[path]) for path in result.causes)
    unset = f", {len(asked)} {UNSET}" if asked else ""
    yield (
        f"{file}:{command.line}: {command.about}: {len(options)} options, {translated} translated,"
        f" {len(needless)} need no setting, {len(lost)} without a counterpart{unset}; {defaults} settings are its defaults"
    )
    yield from (f"  {text}" for text in version_lines(result))
    for note in lost[:SHOWN]:
        yield f"  {described(note)}"
    if len(lost) > SHOWN:
        yield f"  and {len(lost) - SHOWN} more, in the comments of {place}"
    yield from (f"  {text}" for text in to_do(result))
    yield f"Written to {place}. Check it, then train:" if wrote else f"Save it with -o {place} first, check it, then train:"
    flags = list(_flags(result))
    yield f"  {rlhf('train', '--config', place, *flags, '--dry-run')}"
    yield f"  {rlhf('train', '--config', place, *flags)}"


def _flags(result: Translation) -> Iterator[str]:
    """Yields flags of what the reader must set, with words in place of the values. A flag that chooses one of several plugins
    chooses all of them, and the other options of a plugin that it replaces are given too.
    """
    done = set()
    for key in result.asked:
        head, _, name = key.partition(".")
        option = name.rpartition(".")[2]
        if head in MANY and option == "name" and head not in done:
            done.add(head)
            yield from _chosen(result, head)
        elif head not in MANY or option != "name":
            flag = key.removesuffix(".name").removesuffix(".sources").replace("_", "-")
            yield from (f"--{flag}", "PATH" if key.endswith(".sources") else key.rpartition(".")[2].upper())


def _chosen(result: Translation, head: str) -> Iterator[str]:
    """Yields flags that choose the plugins of a section."""
    keys = dict.fromkeys(key for key in (*result.settings, *result.asked) if key.startswith(f"{head}."))
    for key in (key for key in keys if key.endswith(".name")):
        alias = key.split(".")[1]
        yield from (f"--{head}", f"{alias}={'NAME' if key in result.asked else result.settings[key]}")
    for key in keys:
        section, _, option = key.rpartition(".")
        if f"{section}.name" in result.asked and option != "name" and key not in result.asked:
            yield from (f"--{key.replace('_', '-')}", str(result.settings[key]))
