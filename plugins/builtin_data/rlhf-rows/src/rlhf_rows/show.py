"""``rlhf data show``: a file as training would read it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import click

from rlhf_host import UserError
from rlhf_host.commands import phase, visible
from rlhf_host.settings import CommandLine, DataConfig, DataSource, RoleConfig, SettingsCommand

if TYPE_CHECKING:
    from rlhf_host.batches import TaskSet
    from rlhf_rows.units import UnitSet

START = {
    "actor.model": "the model whose tokenizer, chat template and context count",
    "rows": "how many rows to show (int, default 3)",
    "data.format": "how to read rows that have answers; default: what the columns say",
}

ABOUT = """Read a file, a directory or a hub dataset as rlhf train would, say what was found, and show rows as text, the trained
tokens in ⟦⟧. Rows without answers are shown as prompts."""

_FIRST = 20  # rows that settle what the file is
_MEASURED = 10_000  # units whose lengths are looked at


@click.command(
    cls=SettingsCommand,
    control=("rows",),
    usage="data show FILE [FLAGS]",
    about=ABOUT,
    start=START,
    sections={"data": "Data"},
    example="data show train.jsonl --model models/x",
    takes=("actor", "data"),
    takes_file=True,
)
def show(line: CommandLine) -> None:
    """Show how a file is read: its format, lengths, and rows with their trained tokens."""
    if line.file is None:
        raise UserError("no file is given: rlhf data show FILE --actor.model DIR")
    count = line.number("rows", "3", "how many rows to show, as a whole number") or 0
    config = line.read(quickstart=False).config
    actor = config.roles["actor"]
    if not actor.model:
        raise UserError("no model is given: add --actor.model DIR, whose tokenizer and chat template say what a row becomes")
    phase("Loading the tokenizer")
    data = config.data.model_copy(update={"sources": [DataSource(path=line.file)]})
    for text in _shown(data, actor, count):
        click.echo(text)


def _shown(data: DataConfig, actor: RoleConfig, count: int) -> Iterator[str]:
    from rlhf_host.installed import PluginInfo
    from rlhf_host.internals import load_tasks, open_source
    from rlhf_host.models import load_tokenizer, sizes, stop_tokens
    from rlhf_rows.formats import likely_kind
    from rlhf_rows.load_units import load_units, marker_of

    tokenizer, (source,) = load_tokenizer(actor), data.sources
    rows = open_source(source, source.path, "train", {})
    first: list[Any] = [] if isinstance(rows, PluginInfo) else list(islice(rows.rows, _FIRST))
    kind = likely_kind(first, data.format, split_at=data.split_at is not None)
    if kind is None:
        yield from _tasks(load_tasks(data, split="train", tokenizer=tokenizer, seed=0), tokenizer, count)
        return
    stops = stop_tokens(actor)
    units = load_units(data, kind=kind, split="train", tokenizer=tokenizer, max_tokens=sizes(actor)[1], stop_ids=stops)
    yield from _units(units, tokenizer, marker_of(data, tokenizer, stops), count)


def _tasks(tasks: TaskSet, tokenizer: Any, count: int) -> Iterator[str]:
    yield from tasks.report
    for number, task in enumerate(tasks.tasks[:count], start=1):
        label = "" if task.ground_truth is None else f" — label {visible(str(task.ground_truth))}"
        yield f"{number}: {visible(str(tokenizer.decode(list(task.prompt_ids or ()))))}{label}"


def _units(units: UnitSet, tokenizer: Any, marker: Any, count: int) -> Iterator[str]:
    from rlhf_rows.shown import shown

    yield from (line for line in units.report if ": first row, " not in line)
    all_units = list(chain.from_iterable(source[:: len(source) // _MEASURED or 1] for source in units.sources.values()))
    rows = [row for unit in all_units for row in unit.rows]
    yield f"tokens of prompts: {_span([len(row.prompt_ids) for row in rows])}"
    yield f"tokens of completions: {_span([len(row.completion_ids) for row in rows])}"
    yield f"trained tokens: {_span([sum(end - begin for begin, end in row.trained) for row in rows])}"
    for number, unit in enumerate(all_units[:count], start=1):
        for row in unit.rows:
            columns = "".join(f" {name} {value:g}" for name, value in row.columns.items())
            yield f"{number}{columns}: {shown(row, tokenizer, marker)}"


def _span(values: Sequence[int]) -> str:
    ordered = sorted(values)
    places = {"least": 0, "half have at most": len(ordered) // 2, "most": len(ordered) - 1}
    return ", ".join(f"{name} {ordered[place]:,}" for name, place in places.items())
