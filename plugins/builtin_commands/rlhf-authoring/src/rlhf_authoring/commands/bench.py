"""``rlhf plugins bench``: time and memory of each hook of an installed plugin."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import click

from rlhf_authoring.child import ChildFailed, answers
from rlhf_authoring.commands.check import read_texts
from rlhf_authoring.commands.chosen import option_option, parse_texts, with_hooks
from rlhf_host import UserError
from rlhf_host.commands import complete_plugin, kind_option
from rlhf_host.installed import PluginInfo

DEADLINE_S = 600.0
HEAD = ("HOOK", "TIME", "MEMORY", "CALLS", "SIZE")


@click.command()
@click.argument("name", shell_complete=complete_plugin)
@option_option
@kind_option()
@click.option("--rows", type=click.IntRange(1), help="Trajectories.  [default: 1024 in a batch; 512 to judge, play or log]")
@click.option("--tokens", type=click.IntRange(1), default=1024, show_default=True, help="Longest completion of a batch.")
@click.option("--json", "as_json", is_flag=True, help="Print a list of objects, one per plugin, instead of tables.")
@click.pass_context
def bench(
    ctx: click.Context, name: str, option: Sequence[str], kind: str | None, rows: int | None, tokens: int, as_json: bool
) -> None:
    """Measure what each hook of the plugin NAME or DISTRIBUTION:NAME costs per call, at the sizes of a real run.

    Time is the median of all calls except the first. Memory is the most that a call adds, without worker processes of the
    plugin. Everything runs on the CPU. If a hook fails, the exit code is 1.
    """
    options, reports, failed = parse_texts(option), [], False
    infos = [info for info in with_hooks(name, kind, options, "no hooks to call") if info.kind != "preset"]
    if not infos:
        raise UserError(f"preset {name!r} has no hooks to measure")
    for position, info in enumerate(infos):
        costs = list(measure(info, options, rows, tokens))
        failed = failed or any(cost["problem"].startswith("failed") for cost in costs)
        about = {field: getattr(info, field) for field in ("kind", "name", "distribution", "version")}
        reports.append({**about, "hooks": costs})
        if not as_json:
            click.echo(f"{chr(10) if position else ''}{info.kind} {info.name} from {info.source}\n")
            click.echo("\n".join(_table(costs)))
    if as_json:
        click.echo(json.dumps(reports, indent=2))
    if failed:
        ctx.exit(1)


def measure(info: PluginInfo, options: Mapping[str, Any], rows: int | None, tokens: int) -> Iterator[dict[str, Any]]:
    """Fields of ``testing.bench.Cost`` as they come, from a process of its own.

    Raises:
        UserError: the plugin cannot be built, or not with these options.
    """
    name = f"{info.distribution}:{info.name}"
    job = {"kind": info.kind, "name": name, "options": dict(options), "rows": rows, "tokens": tokens}
    try:
        for answer in answers(f"{__name__}:_work", job, DEADLINE_S):
            if "refused" in answer:
                raise UserError(answer["refused"])
            yield answer
    except ChildFailed as failure:
        raise UserError("\n".join(filter(None, [f"{info}: measuring it {failure}", failure.tail]))) from failure


def _work(job: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """In the child."""
    from rlhf_authoring.bench import bench as measure_hooks
    from rlhf_authoring.contracts.subject import Subject, Unusable

    subject = Subject(job["kind"], job["name"])
    try:
        subject.options = read_texts(subject.info, subject.cls, job["options"])
        for cost in measure_hooks(subject, rows=job["rows"], tokens=job["tokens"]):
            yield asdict(cost)
    except (UserError, Unusable) as error:
        yield {"refused": str(error)}


def _table(costs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    rows = [HEAD]
    for cost in costs:
        if cost["problem"]:
            rows.append((cost["hook"], "-", "-", "-", cost["problem"]))
        else:
            rows.append((cost["hook"], _time(cost["median_s"]), _memory(cost["peak_bytes"]), str(cost["calls"]), cost["size"]))
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    for hook, *numbers, size in rows:
        cells = (cell.rjust(width) for cell, width in zip(numbers, widths[1:4], strict=True))
        yield "  ".join([hook.ljust(widths[0]), *cells, size]).rstrip()


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.2g} µs"


def _memory(size: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} B"
