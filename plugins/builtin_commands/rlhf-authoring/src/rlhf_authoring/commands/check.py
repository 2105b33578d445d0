"""``rlhf plugins check``: the contract suite on an installed plugin."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from rlhf_authoring.child import ChildFailed, answers
from rlhf_authoring.commands.certify import (
    SHOWINGS,
    certificate_option,
    described,
    key_option,
    refuse_early,
    show,
    stopped_option,
    write,
)
from rlhf_authoring.commands.chosen import deadline_option, option_option, parse_texts, with_hooks
from rlhf_host import UserError
from rlhf_host.commands import complete_plugin, kind_option, visible, wrap
from rlhf_host.installed import PROTOCOLS, PluginInfo

DEADLINE_S = 300.0
SHOWN = {"passed": "green", "failed": "red", "skipped": "yellow"}


@dataclass(frozen=True, slots=True)
class Checked:
    """One check's result; its fields are the keys of ``--json``."""

    name: str
    result: str
    """``passed``, ``failed``, or ``skipped``: it could not run, and ``message`` says why."""
    message: str = ""
    rule: str = ""
    """Demand of the check, in words."""
    seconds: float = 0.0


@click.command()
@click.argument("name", shell_complete=complete_plugin)
@option_option
@kind_option()
@click.option("--json", "as_json", is_flag=True, help="Print a list of objects, one per plugin, instead of a report.")
@deadline_option(DEADLINE_S, "Seconds one check may take.")
@certificate_option
@key_option
@stopped_option
@click.pass_context
def check(
    ctx: click.Context,
    name: str,
    option: Sequence[str],
    kind: str | None,
    as_json: bool,
    deadline: float,
    certificate: Path | None,
    key: Path | None,
    stopped: Sequence[str],
) -> None:
    """Run the contract suite on the installed plugin NAME or DISTRIBUTION:NAME. It checks everything the host relies on.

    The checks run in a separate process. If one fails, the exit code is 1. A preset is loaded and its settings are checked. A
    class in a file is FILE.py:NAME with --kind.

    With --output, which writes a certificate, gradients of the loss are compared with its slope in float64, and a tiny model is
    trained for some seconds to see whether its mean reward rises.
    """
    options, reports = parse_texts(option), []
    width = min(shutil.get_terminal_size().columns, 120)
    infos = with_hooks(name, kind, options, "no contract suite", (*PROTOCOLS, "command"))
    if certificate is None:
        if key is not None or stopped:
            raise UserError(f"{'--key' if key is not None else '--stopped'} needs --output FILE")
    else:
        infos = [info for info in infos if info.kind != "preset"] or infos
        if len(infos) > 1:
            raise UserError(f"{name!r} is {' and '.join(map(str, infos))}: a certificate is of one of them, with --kind")
        refuse_early(certificate, key)
    for position, info in enumerate(infos):
        if not as_json:
            click.echo(f"{chr(10) if position else ''}{info.kind} {info.name} from {info.source}")
        if info.kind == "extension":
            from rlhf_host.settings import Names  # pydantic comes with it

            if Names().place(info.name)[1] is None:
                flag = f"{info.name}.OPTION"
                click.echo(f"Warning: {info.name!r} is a setting too, and --{flag} sets that: write --with.{flag}", err=True)
        results: list[Checked] = []
        started = time.monotonic()
        for checked in run_checks(info, options, deadline):
            if not as_json:
                repeated = any(other.message == checked.message for other in results)
                click.echo("\n".join(_lines(checked, width, repeated)))
            results.append(checked)
        if not as_json:
            counts = Counter(checked.result for checked in results)
            summary = ", ".join(f"{counts[result]} {result}" for result in SHOWN if counts[result])
            click.echo(f"\n{summary} in {time.monotonic() - started:.0f} s")
        about = {field: getattr(info, field) for field in ("kind", "name", "distribution", "version")}
        report = {**about, "checks": [asdict(checked) for checked in results]}
        reports.append(report)
        if certificate is not None:
            shown = []
            for part in show(info, options, stopped, deadline):
                shown.append(part)
                report[part["name"]] = {key: value for key, value in part.items() if key != "name"}
                if not as_json:
                    result = Checked(part["name"], part["result"], "\n".join(filter(None, [*described(part), part["message"]])))
                    click.echo("\n".join(_lines(result, width, repeated=False)))
            said = write(certificate, key, info, option, results, shown, time.monotonic() - started, _typed(ctx))
            click.echo(said, err=as_json)
    if as_json:
        click.echo(json.dumps(reports, indent=2))
    parts = [part for report in reports for part in (*report["checks"], *(report[name] for name in SHOWINGS if name in report))]
    if any(part["result"] == "failed" for part in parts):
        ctx.exit(1)


def _typed(ctx: click.Context) -> str:
    """The command, as it was typed."""
    words = ctx.command_path.split()
    for parameter in ctx.command.get_params(ctx):
        value = ctx.params.get(parameter.name or "")
        if isinstance(parameter, click.Argument):
            words.append(str(value))
        elif value not in (None, False, ()) and value != parameter.get_default(ctx):
            for each in value if isinstance(value, tuple) else (value,):
                words += [parameter.opts[0]] if each is True else [parameter.opts[0], str(each)]
    return visible(shlex.join(words))


def run_checks(info: PluginInfo, options: Mapping[str, Any], deadline_s: float = DEADLINE_S) -> Iterator[Checked]:
    """Results as they come; a check that ends its process or hangs has failed, and the others run in another process.

    Raises:
        UserError: the plugin has no such options.
    """
    names: dict[str, str] = {}
    done: list[str] = []
    while True:
        job = {"kind": info.kind, "name": f"{info.distribution}:{info.name}", "options": dict(options), "done": done}
        try:
            for answer in answers(f"{__name__}:_work", job, deadline_s):
                if "refused" in answer:
                    raise UserError(answer["refused"])
                if "checks" in answer:
                    names = answer["checks"]
                    continue
                done.append(answer["name"])
                yield Checked(**answer)
            return
        except ChildFailed as failure:
            culprit = next((name for name in names if name not in done), "entry_point_loads")
            message = "\n".join(filter(None, [f"it {failure}", failure.tail]))
            yield Checked(culprit, "failed", message, names.get(culprit, ""))
            if culprit not in names:
                return
            done.append(culprit)


def _work(job: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """In the child: first the names and rules of all checks, then results of those not done."""
    if job["kind"] == "preset":
        yield from _preset(job["name"])
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; the suites' models gain nothing from more
    from rlhf_authoring.contracts.subject import Subject, Unusable
    from rlhf_authoring.contracts.suite import checks_of, run_check

    subject = Subject(job["kind"], job["name"])
    if job["options"]:
        try:
            subject.options = read_texts(subject.info, subject.cls, job["options"])
        except UserError as error:
            yield {"refused": str(error)}
            return
        except Unusable:  # a check of its own reports it
            pass
    checks = checks_of(subject)
    yield {"checks": {check.name: check.rule for check in checks}}
    for check in checks:
        if check.name not in job["done"]:
            start = time.monotonic()
            result = run_check(check, subject)
            outcome = "skipped" if result.passed is None else "passed" if result.passed else "failed"
            yield asdict(Checked(result.name, outcome, result.message, check.rule, round(time.monotonic() - start, 3)))


def _preset(name: str) -> Iterator[dict[str, Any]]:
    from rlhf_host.settings import read_config, resolve

    rule = "Every setting exists and has a value that fits, those of its plugins included."
    yield {"checks": {"settings_are_valid": rule}}
    result, message = "passed", ""
    try:
        loaded = read_config(f"preset:{name}")
        resolve(loaded.config, loaded.origins)
    except UserError as error:
        result, message = "failed", str(error)
    yield asdict(Checked("settings_are_valid", result, message, rule))


def read_texts(info: PluginInfo, cls: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """Texts of the command line as what the plugin's options are. Raises ``PluginError`` when they do not fit."""
    from rlhf_host.installed import options_model, read_options
    from rlhf_host.settings import Text, coerce

    def typed(options: Mapping[str, Any]) -> dict[str, Any]:
        return {key: typed(value) if isinstance(value, dict) else Text(value) for key, value in options.items()}

    values = coerce(options_model(cls), typed(options))
    read_options(info, cls, values)
    return values


def _lines(checked: Checked, width: int, repeated: bool) -> Iterator[str]:
    """``repeated``: an earlier check had the same message."""
    word = click.style(checked.result.upper() if checked.result == "failed" else checked.result, fg=SHOWN[checked.result])
    yield f"  {word}{' ' * (8 - len(checked.result))} {checked.name}"
    for text in (checked.rule if checked.result == "failed" else "", "" if repeated else checked.message):
        for line in text.splitlines():
            yield from (f"           {part}" for part in wrap(line, width - 11))
