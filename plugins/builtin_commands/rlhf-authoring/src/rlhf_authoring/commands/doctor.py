"""``rlhf doctor``: what is wrong with this machine and its libraries, and what to do."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict

import click

from rlhf_authoring.commands.chosen import deadline_option
from rlhf_authoring.doctor.findings import Finding
from rlhf_host.commands import wrap
from rlhf_host.installed import discover

HELP_GROUP = "Plugins"

DEADLINE_S = 60.0
COLOURS = {"ok": "green", "note": None, "absent": None, "warning": "yellow", "problem": "red"}
LABEL = 20


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print an object instead of a report.")
@click.option("--chat", "model", metavar="MODEL|RUN", help="Look at a model's chat template instead: turns, tools, reasoning.")
@deadline_option(DEADLINE_S, "Seconds one import may take.")
@click.pass_context
def doctor(ctx: click.Context, as_json: bool, model: str | None, deadline: float) -> None:
    """Check this machine: Python, torch and GPUs, memory, disk, hubs, libraries that do not fit together, plugins.

    Prints what is wrong and what to do, and what each runtime, engine and backend lacks. Tokens are searched for but never
    shown. Libraries and plugins are imported in separate processes. With problems, the exit code is 1.
    """
    width = min(shutil.get_terminal_size().columns, 120)
    reported: list[Finding] = []
    for finding in findings(deadline) if model is None else _of_chat(model):
        if not as_json:
            if not reported or reported[-1].section != finding.section:
                click.echo(f"{chr(10) if reported else ''}{finding.section}")
            click.echo("\n".join(_lines(finding, width)))
        reported.append(finding)
    counts: Counter[str] = Counter(finding.status for finding in reported)
    if as_json:
        click.echo(json.dumps({"ok": not counts["problem"], "findings": [asdict(finding) for finding in reported]}, indent=2))
    else:
        click.echo(f"\n{_summary(counts)}")
    if counts["problem"]:
        ctx.exit(1)


def _of_chat(model: str) -> Iterator[Finding]:
    from rlhf_authoring.doctor.chat import chat

    return chat(model)


def findings(deadline_s: float) -> Iterator[Finding]:
    """Everything, section by section."""
    from rlhf_authoring.doctor.libraries import gpu_build, libraries, versions
    from rlhf_authoring.doctor.machine import access, machine
    from rlhf_authoring.doctor.plugins import parts, plugins

    seen = list(machine())
    yield from seen
    if sys.stderr.isatty():
        click.echo("\nImporting libraries and plugins: up to a minute", err=True)
    imported = libraries(deadline_s)
    for group in imported.values():
        yield from group
    yield from gpu_build(seen, imported)
    yield from versions([info.distribution for info in discover()])
    yield from plugins(deadline_s)
    yield from parts(imported, deadline_s)
    yield from access()


def _lines(finding: Finding, width: int) -> Iterator[str]:
    status = click.style(finding.status.upper() if finding.status == "problem" else finding.status, fg=COLOURS[finding.status])
    head = f"  {status}{' ' * (8 - len(finding.status))} {finding.name:{LABEL}} "
    indent = 12 + LABEL
    detail = wrap(finding.detail, width - indent) or [""]
    if len(finding.name) > LABEL:
        detail.insert(0, "")
    yield f"{head}{detail[0]}".rstrip()
    yield from (f"{'':{indent}}{line}" for line in detail[1:])
    yield from (f"{'':{indent}}{line}" for line in wrap(finding.advice, width - indent, "→ ", "  "))


def _summary(counts: Counter[str]) -> str:
    if not counts["problem"] and not counts["warning"]:
        return "No problems."
    return ", ".join(
        f"{counts[status]} {status}{'s' if counts[status] != 1 else ''}" for status in ("problem", "warning") if counts[status]
    )
