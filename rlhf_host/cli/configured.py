"""What ``rlhf train`` and ``rlhf eval`` share: flags as typed, and help generated from the schema and the chosen plugins."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from rlhf_host.config.flags import Flag
from rlhf_host.config.layers import DEFAULT, Layer
from rlhf_host.config.load import assemble
from rlhf_host.config.schema import DataConfig, RoleConfig, RunConfig
from rlhf_host.config.sections import MANY, ROLES, SINGLE, role_flag, spelled
from rlhf_host.plugins.options import Option, describe_options
from rlhf_host.plugins.selection import find, load, options_model

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

PLUGINS = {
    "with": "[ALIAS=]NAME: an extension (filters, shaping, corrections); repeatable, in order; ALIAS=none takes one away",
    "agent": "NAME: how an episode is played (default single_turn)",
    "eval.reward": "[ALIAS=]NAME: rewards for evaluation (default: the training rewards)",
    "tracker": "[ALIAS=]NAME: repeatable, beside console and jsonl; ALIAS=none takes one away",
    "engine": "NAME: what generates tokens (default transformers)",
    "backend": "NAME: what makes optimizer steps (default torch)",
    "runtime": "NAME: where roles live (default local)",
    "sync": "NAME: how weights reach the engines (default in_process; broadcast with --runtime ray)",
}


class RawCommand(click.Command):
    """Hands its arguments over as typed: its flags are those of the configuration and of the chosen plugins.

    ``control`` names the command's own flags beside these; ``takes_file``: the first word is a file.
    """

    def __init__(self, *args: Any, control: Sequence[str] = (), takes_file: bool = False, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.control = control
        self.takes_file = takes_file

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.params["argv"] = list(args)
        return []

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        from rlhf_host.cli.complete_flags import complete

        return complete(ctx.params.get("argv", []), incomplete, self.control, self.takes_file)


def show_help(
    usage: str,
    about: str,
    start: Mapping[str, str],
    sections: Mapping[str, str],
    flags: Sequence[Flag],
    config: str | None,
    presets: Sequence[str],
) -> None:
    """Print help: ``start`` (flag → text), the chosen plugins' options, then the schema's ``sections`` (key → title).

    Imports the plugins that flags or files choose, and only those. Mistakes among the flags are not reported here.
    """
    formatter = click.HelpFormatter(width=max(60, min(shutil.get_terminal_size().columns, 120)))
    formatter.write_usage("rlhf", usage)
    formatter.write_paragraph()
    formatter.write_text(about)
    _write(formatter, "Start here", ((f"--{flag}", text) for flag, text in start.items()))
    layer, _ = assemble(config, flags, presets, [])
    for kind, spec, prefix in chosen_plugins(layer):
        _write(formatter, *_plugin(kind, spec, prefix))
    _write(
        formatter,
        "Plugins (name one beside --help to see its options)",
        ((f"--{flag}", text) for flag, text in PLUGINS.items()),
    )
    for key, title in sections.items():
        _write(formatter, title, _section(key))
    click.echo(formatter.getvalue().rstrip())


def _write(formatter: click.HelpFormatter, title: str, rows: Iterable[tuple[str, str]]) -> None:
    found = list(rows)
    if found:
        with formatter.section(title):
            formatter.write_dl(found, col_max=34)


def _section(key: str) -> Iterator[tuple[str, str]]:
    if key == "roles":
        yield from _rows("actor", describe_options(RoleConfig))
        others = ", ".join(f"--{role_flag(role)}.*" for role in ROLES if role != "actor")
        yield f"{others}, --roles.NAME.*", "the same for other roles (--reward-model.* is the role 'reward')"
        return
    if key == "data":
        yield from _rows("data", (option for option in describe_options(DataConfig) if option.name != "sources"))
        yield "--data.SOURCE.*", "a setting of one source (weight, subset, split, ...), or an option of the task plugin it is"
        return
    model: Any = RunConfig.model_fields[key].annotation
    yield from _rows(key, (option for option in describe_options(model) if not option.name.startswith(("data.", "reward"))))
    if key == "eval":
        yield "--eval.data.*", "as --data.*"


def _rows(prefix: str, options: Iterable[Option]) -> Iterator[tuple[str, str]]:
    for option in options:
        facts = option.type
        if option.default is None:
            facts += ", required"
        elif option.default not in ("None", "[]", "{}"):
            facts += f", default {option.default}"
        facts = facts.replace("'", "")
        yield f"--{prefix}.{option.name.replace('_', '-')}", f"{option.description} ({facts})".strip()


def chosen_plugins(layer: Layer) -> Iterator[tuple[str, str, str]]:
    """Kind, name and the options' prefix (``algo``, ``reward.strict``) of plugins that somebody chose, not of the defaults."""
    for key, kind in SINGLE.items():
        if "plugin" in layer.get(key, {}) and layer[key]["plugin"].where != DEFAULT:
            yield kind, layer[key]["plugin"].value, key
    for key, kind in MANY.items():
        for alias, choice in layer.get(key, {}).items():
            if choice["plugin"].where != DEFAULT:
                yield kind, choice["plugin"].value, f"{spelled(key)}.{alias}"


def _plugin(kind: str, spec: str, prefix: str) -> tuple[str, list[tuple[str, str]]]:
    info = find(kind, spec)
    rows = list(_rows(prefix, describe_options(options_model(load(info)))))
    if kind == "reward":
        rows.insert(0, (f"--{prefix}.weight", "factor in the weighted sum; 0 logs without counting (float, default 1.0)"))
    return f"Options of {info}", rows or [(f"--{prefix}", "has no options")]
