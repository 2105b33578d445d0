"""``rlhf translate``: another project's command line or configuration as ours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from rlhf_host.command import rlhf
from rlhf_host.directories import write_file
from rlhf_host.errors import UserError, visible
from rlhf_host.translate.commands import find_commands
from rlhf_host.translate.translation import Translation
from rlhf_host.translate.translation import translate as translated
from rlhf_host.translate.write import described, file_text, to_do

SHOWN = 30
"""Options without a counterpart, on standard error."""


@click.command()
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@click.option(
    "--from", "origin", metavar="PROJECT[:METHOD]", help="Whose the file is, where it does not say: openrlhf, trl:grpo, verl."
)
@click.option(
    "--output", "-o", metavar="FILE.yaml", type=click.Path(path_type=Path, dir_okay=False), help="Default: standard output."
)
def translate(file: Path, origin: str | None, output: Path | None) -> None:
    """Turn a command line of OpenRLHF or TRL, or a configuration of verl or TRL, into one for rlhf train.

    FILE is a shell script, which is read and not run, or a YAML file. Comments of the result say where each setting comes from,
    which defaults differ, and which options have no counterpart here.
    """
    if output is not None and not output.parent.is_dir():
        raise UserError(f"--output {output}: there is no directory {output.parent}")
    commands, others = find_commands(file, origin)
    for line in others:
        click.echo(visible(line), err=True)
    results = [translated(command, str(file)) for command in commands]
    texts = [file_text(result, str(file)) for result in results]
    if output is None:
        click.echo("---\n".join(texts), nl=False)
    places = _places(output, len(results))
    for result, text, place in zip(results, texts, places, strict=True):
        if output is not None:
            write_file(place, text.encode())
        for line in _report(result, place, file, output is not None):
            click.echo(line, err=True)


def _places(output: Path | None, number: int) -> Sequence[Path]:
    """A file for each command."""
    place = output or Path("run.yaml")
    return [place] if number == 1 else [place.with_stem(f"{place.stem}-{count}") for count in range(1, number + 1)]


def _report(result: Translation, place: Path, file: Path, wrote: bool) -> Iterator[str]:
    command, options = result.command, result.of_options
    lost, needless = [note for note in options if note.lost], [note for note in options if note.needs_none]
    defaults = sum(not any(note.option.line for note in result.causes[path]) for path in result.settings)
    yield (
        f"{file}:{command.line}: {command.about}: {len(options)} options, {len(options) - len(lost) - len(needless)} translated,"
        f" {len(needless)} need no setting, {len(lost)} without a counterpart; {defaults} settings are its defaults"
    )
    others = [note for note in lost if not note.outcome.todo]
    for note in others[:SHOWN]:
        yield f"  {described(note)}"
    if len(others) > SHOWN:
        yield f"  and {len(others) - SHOWN} more, in the comments of {place}"
    yield from (f"  {text}" for text in to_do(result))
    yield f"Written to {place}. Check it, then train:" if wrote else f"Save it with -o {place} first, check it, then train:"
    flags = [word for note in result.todo for word in _flag(note.outcome.todo)]
    yield f"  {rlhf('train', '--config', place, *flags, '--dry-run')}"
    yield f"  {rlhf('train', '--config', place, *flags)}"


def _flag(key: str) -> tuple[str, str]:
    """Of a key that is not set, with a word in place of the value."""
    return f"--{key.removesuffix('.name').replace('_', '-')}", key.rpartition(".")[2].upper()
