"""Parts that commands with a configuration share: flags as typed, and help from the schema and the chosen plugins."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rlhf_host.cli.help_text import Formatter
from rlhf_host.cli.plugin_names import left_out
from rlhf_host.config.defaults import WORDS
from rlhf_host.config.flag_names import known_flags
from rlhf_host.config.flags import LETTERS, Flag, parse, take
from rlhf_host.config.load import LoadedConfig, assemble, read_config
from rlhf_host.config.merge import DEFAULT
from rlhf_host.config.problems import Problems
from rlhf_host.config.schema import SyncChoice, defaults
from rlhf_host.config.tree import MANY, NAMED, ROLES, SHORT, SINGLE, Names, annotation_at, is_choice, lora_path, role_flag
from rlhf_host.config.yaml_file import Located
from rlhf_host.errors import UserError
from rlhf_host.once import looked_up_once
from rlhf_host.plugins.discovery import discover
from rlhf_host.plugins.options import Option, describe_options, options_model
from rlhf_host.plugins.recommended import recommended
from rlhf_host.plugins.selection import find, load

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

PLUGINS = {
    "with": "[ALIAS=]NAME: an extension (filters, shaping, corrections); repeatable, in order; ALIAS=none removes one",
    "agent": "NAME: how an episode is played",
    "agents": "[ALIAS=]NAME: further agents, for tasks that name one (data.agent_key); repeatable",
    "eval.reward": "[ALIAS=]NAME: rewards for evaluation; default: the training rewards",
    "tracker": "[ALIAS=]NAME: where metrics go; repeatable, adds to the default ones, as --NAME does; ALIAS=none removes one",
    "engine": "NAME: what generates tokens",
    "backend": "NAME: what makes optimizer steps",
    "runtime": "NAME: in which processes models run",
    "sync": "NAME: how weights reach the engines; default: one that suits engine and runtime",
    "kernels": "NAME; auto: the installed ones that suit model and device; none: the plain path",
    "sync.verify": str(SyncChoice.model_fields["verify"].description),
    "sync.adapter": str(SyncChoice.model_fields["adapter"].description),
    "NAME.OPTION": "an option of the extension, tracker or runtime NAME; it also chooses NAME, as --NAME alone does: short for"
    " --with NAME --with.NAME.OPTION",
}
"""Flags that choose plugins; help adds defaults and what is installed."""

OTHERS = {
    "roles": {
        f"{', '.join(f'--{role_flag(role)}.*' for role in ROLES[1:])}, --roles.NAME.*": "the same for other roles"
        " (--reward-model.* is the role 'reward')"
    },
    "data": {"--data.SOURCE.*": "a setting of one source (weight, subset, split, ...), or an option of a task plugin"},
    "eval": {"--eval.data.*": "as --data.*"},
}
"""Section → flags that stand for many."""


SHARED = {
    "config": "NAME or FILE: settings of a preset, a recipe, an environment or a file; repeatable, later ones override; flags"
    " override them all; an unknown name lists the recipes",
    "disable": "NAME: ignore an installed plugin, as RLHF_DISABLE_PLUGINS does; repeatable",
}
"""Flags of all commands with settings."""


@dataclass(frozen=True, slots=True)
class CommandLine:
    """The words typed: the command's own flags with their values, all others, and the file that comes first."""

    names: Sequence[str]
    """All the command's own flags."""
    own: Mapping[str, list[str | None]]
    flags: list[Flag]
    file: str | None

    def value(self, name: str, default: str | None = None) -> str | None:
        return self.own.get(name, [default])[0]

    def number(self, name: str, default: str | None, meaning: str, least: int = 0) -> int | None:
        """The flag's whole number. Raises ``UserError``, which says its ``meaning``, for another value."""
        text = self.value(name, default)
        if text is not None and (not text.isdecimal() or int(text) < least):
            raise UserError(f"--{name} {text}: {meaning}")
        return None if text is None else int(text)

    @property
    def configs(self) -> list[str]:
        """Names behind ``--config``."""
        return [name for name in self.own.get("config", []) if name]

    @property
    def chosen_settings(self) -> list[str]:
        """Flags of this line that choose settings."""
        return ["--config"] if "config" in self.own else []

    def refuse_settings(self, why: str) -> None:
        """Raises ``UserError`` where the line chooses settings or a model, and others count."""
        if clashes := self.chosen_settings + [flag.text for flag in self.flags if flag.keys[-2:] == ["actor", "model"]]:
            raise UserError(f"{why}: leave {clashes[0]} out")

    def read(self, config: Path | Located | None = None, *, quickstart: bool = True) -> LoadedConfig:
        """The configuration, of ``config`` if not of ``configs``; notices are printed."""
        loaded = read_config(self.configs if config is None else config, self.flags, self.names, quickstart=quickstart)
        for notice in loaded.notices:
            click.echo(notice, err=True)
        return loaded


class SettingsCommand(click.Command):
    """A command with the flags of the configuration and of the chosen plugins: its function gets a ``CommandLine``.

    Args:
        control: the command's own flags, beside those that all have.
        usage: what the command's help begins with; then come ``about``, ``start`` (flag → text; empty: the schema's), the chosen
            plugins' options and the schema's ``sections`` (key → title).
        takes: settings that the command uses, as flags spell them (``seed``, ``rollout``, ``actor.model``); flags of others are
            refused, and help leaves them out. Empty: it uses all.
        takes_file: whether the first word is a file.
        short: short names of settings → their whole names.
        example: a line of words that help ends with, without ``rlhf`` in front; ``{algo}`` and ``{reward}`` stand for plugins to
            begin with.
    """

    def __init__(
        self,
        *args: Any,
        control: Sequence[str],
        usage: str,
        about: str,
        start: Mapping[str, str],
        sections: Mapping[str, str],
        takes: Sequence[str] = (),
        takes_file: bool = False,
        short: Mapping[str, str] = SHORT,
        example: str = "",
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self.short, self.example = short, example
        self.control, self.takes, self.takes_file = (*control, *SHARED, "help"), takes, takes_file
        self.usage, self.about, self.start, self.sections = usage, about, {**start, **SHARED}, sections

    @looked_up_once()
    def invoke(self, ctx: click.Context) -> Any:
        return super().invoke(ctx)

    @looked_up_once()
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = list(args)
        if ctx.resilient_parsing:  # which is how completion asks
            ctx.params["argv"] = words
            return []
        file = words.pop(0) if self.takes_file and words and not words[0].startswith("-") else None
        own, flags = take(parse(words, self.short), self.control)
        ctx.with_resource(left_out(own.get("disable", ())))
        line = CommandLine(self.control, own, flags, file)
        if "help" in own:
            self.show_help(line)
            ctx.exit()
        self._refuse_others(flags)
        ctx.params["line"] = line
        return []

    def _refuse_others(self, flags: Sequence[Flag]) -> None:
        """Raises ``UserError`` for flags of settings that the command does not use."""
        flag = next((flag for flag in flags if not self.uses_flag(flag)), None)
        if flag is not None:
            head = str(setting_of(flag)).partition(".")[0]
            beside = [taken for taken in self.takes if taken.startswith(f"{head}.")]
            listed = beside or dict.fromkeys(taken.partition(".")[0] for taken in self.takes)
            names = ", ".join(f"--{taken}{'' if taken in self.takes else '.*'}" for taken in listed)
            command = " ".join(word for word in self.usage.split() if word.islower())
            raise UserError(f"{flag.text}: rlhf {command} does not use it; it takes {names}")

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        from rlhf_host.cli.complete_flags import complete

        return complete(self, ctx.params.get("argv", []), incomplete)

    def show_help(self, line: CommandLine) -> None:
        """Imports the plugins that flags or files choose, and only those. Mistakes among the flags are not reported here."""
        formatter = Formatter(width=max(60, min(shutil.get_terminal_size().columns, 120)))
        formatter.write_usage("rlhf", self.usage)
        formatter.write_paragraph()
        formatter.write_text(self.about)
        _write(formatter, "Start here", self._spelled(_with_names(self.start)))
        tree = assemble(line.configs, line.flags, Problems())
        for kind, spec, prefix in chosen_plugins(tree):
            _write(formatter, *_plugin(kind, spec, prefix))
        plugins = {flag: text for flag, text in PLUGINS.items() if self.uses(flag.partition(".")[0])}
        _write(formatter, "Plugins (choose one and add --help to see its options)", _with_names(plugins))
        for key, title in self.sections.items():
            _write(formatter, title, self._spelled(self._section(key)))
        if self.example:
            with formatter.section("Example"):
                plugins = {kind: recommended(kind, "prompts") for kind in ("algo", "reward")}
                formatter.write_text(f"rlhf {self.example.format(**plugins)}")
        click.echo(formatter.getvalue().rstrip())

    def _spelled(self, rows: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
        """Yields rows of help with the flags' short names in front."""
        for flag, text in rows:
            names = [f"--{name}" for name, long in self.short.items() if f"--{long}" == flag and name not in self.control]
            yield ", ".join([*(letter for letter, long in LETTERS.items() if long in (flag, *names)), *names, flag]), text

    def uses(self, name: str) -> bool:
        """Returns True for a setting or section that the command uses."""
        return not self.takes or any(f"{name}.".startswith(f"{taken}.") for taken in self.takes)

    def uses_flag(self, flag: Flag) -> bool:
        """Returns False for a flag of a setting that the command does not use."""
        return not self.takes or (name := setting_of(flag)) is None or self.uses(name)

    def _section(self, key: str) -> Iterator[tuple[str, str]]:
        prefix = "actor." if key == "roles" else f"{key}."
        for flag, option in known_flags().items():
            if flag.startswith(prefix) and not flag.startswith(("eval.data", "eval.reward")) and self.uses(flag):
                yield _row(flag, option)
        if self.uses(key):
            yield from OTHERS.get(key, {}).items()


def setting_of(flag: Flag) -> str | None:
    """Returns the setting of a flag, as flags spell it: ``actor.lora.rank``, ``runtime``. None: there is no such setting."""
    place, plugin = Names().place(flag.keys[0])
    path = lora_path((*place, *flag.keys[1:]))
    if plugin is None and annotation_at(path) is None:
        return None
    head, rest = (role_flag(str(path[1])), path[2:]) if path[0] == "roles" and len(path) > 1 else (path[0], path[1:])
    return ".".join(map(str, (head, *rest))).replace("_", "-")


def kind_of(flag: str) -> str | None:
    """Returns the kind of plugin that the flag chooses, if it does."""
    key = flag.removeprefix("eval.") if flag == "eval.reward" else flag
    return SINGLE.get(key) or MANY.get(key)


def _with_names(flags: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Rows for flags; those that choose plugins say which there are, those without a text what the schema says."""
    installed = discover()
    for flag, text in flags.items():
        if not text:
            yield _row(flag, known_flags()[flag])
            continue
        names = dict.fromkeys(info.name for info in installed if info.kind == kind_of(flag))
        default = defaults().get(flag, {})
        facts = ["default " + str(default.get("name") or ", ".join(default))] if default else []
        facts += ["installed: " + ", ".join(names)] if names else []
        yield f"--{flag}", f"{text} ({'; '.join(facts)})" if facts else text


def _write(formatter: click.HelpFormatter, title: str, rows: Iterable[tuple[str, str]]) -> None:
    listed = list(rows)
    if listed:
        with formatter.section(title):
            formatter.write_dl(listed, col_max=34)


def _row(flag: str, option: Option) -> tuple[str, str]:
    facts = option.type
    if option.default is None:
        facts += ", required"
    elif option.default not in ("None", "[]", "{}"):
        facts += f", default {option.default}"
    facts = facts.replace("'", "")
    return f"--{flag.replace('_', '-')}", f"{option.description} ({facts})".strip()


def chosen_plugins(tree: Located) -> Iterator[tuple[str, str, str]]:
    """Kind, name and the options' prefix (``algo``, ``reward.strict``) of plugins that somebody chose, not of the defaults."""
    for key, kind in {**SINGLE, **MANY}.items():
        choices = tree.value.get(key, Located({}, DEFAULT))
        for alias, choice in {"": choices}.items() if is_choice((key,)) else choices.value.items():
            name = choice.value.get("name")
            if name is not None and name.where != DEFAULT and (kind != "kernels" or name.value not in WORDS):
                prefix = name.value if name.implied and kind in NAMED else f"{key}.{alias}".rstrip(".")
                yield kind, name.value, prefix


def _plugin(kind: str, spec: str, prefix: str) -> tuple[str, list[tuple[str, str]]]:
    info = find(kind, spec)
    rows = [_row(f"{prefix}.{option.name}", option) for option in describe_options(options_model(load(info)))]
    if kind == "reward":
        flag = f"--{prefix.replace('_', '-')}.weight"
        rows.insert(0, (flag, "factor in the weighted sum; 0: only logged (float, default 1.0)"))
    return f"Options of {info}", rows or [(f"--{prefix}", "has no options")]
