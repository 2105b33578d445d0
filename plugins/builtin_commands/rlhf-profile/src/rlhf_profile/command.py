"""``rlhf profile``: where the time of recorded steps went."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from rlhf_host import UserError
from rlhf_host.commands import rlhf
from rlhf_host.runs import RunDirectory
from rlhf_host.settings import RunConfig
from rlhf_profile.operations import together
from rlhf_profile.plugin import FOLDER, RECORD, TIMELINE

HELP_GROUP = "Look at runs"
LONGEST = 10
"""Operations in a table."""
ORDER = ("trains", "computes", "samples", "asks", "scores", "syncs", "evaluates", "saves", "works", "waits")


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--step", "chosen", type=click.IntRange(min=1), help="Only this step.")
@click.option("--json", "as_json", is_flag=True, help="Print everything that is known, as one JSON object.")
def profile(run: Path, chosen: int | None, as_json: bool) -> None:
    """Show where the time of recorded steps went: phases, what each process did and how long it waited, the longest operations.

    RUN is a run with --with profile.
    """
    directory = RunDirectory(run).path
    records = list(_records(directory))
    if not records:
        raise UserError(
            f"{directory} has no recorded steps: {rlhf('train', '--with', 'profile', '--profile.steps', '3,10-12')}"
        )
    if chosen is not None and chosen not in (steps := [record["step"] for record in records]):
        raise UserError(f"{directory}: step {chosen} was not recorded: there are {', '.join(map(str, steps))}")
    records = [record for record in records if chosen in (None, record["step"])]
    if as_json:
        click.echo(json.dumps({"steps": records}))
        return
    for record in records:
        click.echo("\n".join(_lines_of_step(record, directory)))
    click.echo("\n".join(_table(records)))


def afterword(config: RunConfig) -> list[str]:
    """The entry point in the group ``rlhf.afterwords``: the longest operations of a run with the extension."""
    directory = Path(str(config.run_dir))
    if not any(choice.name == "profile" for choice in config.extensions.values()):
        return []
    records = list(_records(directory))
    if not records:
        return []
    steps = ", ".join(str(record["step"]) for record in records)
    where = (
        f"Recorded steps: {steps}. {directory / FOLDER}/step-*/{TIMELINE} and *.trace.json.gz open in https://ui.perfetto.dev"
    )
    return [where, f"  {rlhf('profile', directory)} shows each step and process", *_table(records)]


def _records(directory: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(directory.glob(f"{FOLDER}/step-*/{RECORD}")):
        try:
            record = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read: {error}") from error
        yield record


def _lines_of_step(record: dict[str, Any], directory: Path) -> Iterator[str]:
    """Yields the lines of one step: phases, processes, files."""
    seconds = record["seconds"]
    unended = "" if record["time/step"] is not None else ", and did not end"
    yield f"Step {record['step']}: {seconds:.3f} s{unended}"
    if record["phases"]:
        parts = ", ".join(f"{part['name']} {part['seconds']:.3f}" for part in record["phases"])
        yield f"  the controller: {parts}; together {record['covered']:.1%}"
    for process in record["processes"]:
        does = [(name, process["seconds"][name]) for name in ORDER if process["seconds"].get(name)]
        told = ", ".join(f"{name} {own:.3f} s ({own / seconds:.0%})" for name, own in does)
        offset, uncertainty = process["clock_us"]
        clock = f"; clock {offset / 1e3:+.3f} ms, ± {uncertainty / 1e3:.3f}" if uncertainty else ""
        yield f"  {process['name']}: {told}{clock}"
        yield from (f"    {note}" for note in process["notes"])
        for file in process["files"]:
            yield f"    {file['name']} ({file['bytes'] / 1e6:.1f} MB)"
    folder = f"step-{record['step']:06d}"
    yield f"  files are in {directory / FOLDER / folder}, with {TIMELINE}"


def _table(records: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the longest operations of all steps and processes, without what ran inside them."""
    rows = together([process["operations"] for record in records for process in record["processes"]])
    lines: list[str] = []
    for device in dict.fromkeys(row["device"] for row in sorted(rows, key=lambda row: row["device"] == "cpu")):
        own = [row for row in rows if row["device"] == device]
        whole = sum(row["seconds"] for row in own)
        lines.append(f"Longest operations ({device}, by their own time, of {whole:.2f} s in all processes):")
        for row in own[:LONGEST]:
            name = row["name"] if len(row["name"]) <= 70 else row["name"][:69] + "…"
            lines.append(f"  {row['seconds']:9.3f} s {row['seconds'] / whole:5.1%} {row['calls']:>9,} calls  {name}")
    return lines
