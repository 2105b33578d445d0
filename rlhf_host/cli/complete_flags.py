"""Completions of ``rlhf train`` and alike in the shell: flags of the schema and of the chosen plugins, and their values.

Runs at every press of the tab key: no torch, and plugins are imported only for their own options, with a deadline.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator, Sequence

from click.shell_completion import CompletionItem

from rlhf_host.cli.configured import PLUGINS, CommandLine, SettingsCommand, chosen_plugins, kind_of
from rlhf_host.cli.lazy import quiet
from rlhf_host.cli.plugin_names import named
from rlhf_host.config.defaults import WORDS
from rlhf_host.config.flag_names import known_flags
from rlhf_host.config.flags import LETTERS, SWITCHES, Flag, parse, take
from rlhf_host.config.load import assemble
from rlhf_host.config.problems import Problems
from rlhf_host.config.recipes import recipes
from rlhf_host.config.tree import NAMED, Names
from rlhf_host.config.yaml_file import Located
from rlhf_host.plugins.discovery import discover
from rlhf_host.plugins.options import Option, describe_options, options_model
from rlhf_host.plugins.selection import find, load

PATIENCE_S = 2.0
"""Seconds for which a plugin's import may keep a person waiting for its options."""

DIRECTORIES = ("resume", "checkpoint", "run-dir")
FILES = ("output", "from-trajectories", "data", "eval.data")


def complete(command: SettingsCommand, argv: Sequence[str], incomplete: str) -> list[CompletionItem]:
    """Returns what ``incomplete`` could become after the words ``argv``."""
    words, control, short = list(argv), command.control, command.short
    if command.takes_file and not words and not incomplete.startswith("-"):
        return [CompletionItem(incomplete, type="file")]
    if command.takes_file and words and not words[0].startswith("-"):
        words.pop(0)
    if words[-1:] == ["="]:  # bash takes --flag=value and alias=name apart
        words.pop()
        if words and not words[-1].startswith("--"):
            words.pop()
    tree = _tree(words, control)
    last = LETTERS.get(words[-1], words[-1]) if words else ""
    if last.startswith("--") and "=" not in last and last[2:] not in SWITCHES and not incomplete.startswith("--"):
        typed = last[2:].replace("_", "-")
        return _values(typed if typed in control else short.get(typed, typed), incomplete, tree)
    items = []
    for name, text in (
        *((f"--{name}", f"--{long}") for name, long in short.items() if name not in control),
        *_flags(incomplete, tree, control),
    ):
        used = name[2:] in control or command.uses_flag(Flag(name[2:], None, short.get(name[2:])))
        if _dashed(name).startswith(_dashed(incomplete)) and used:
            rest = name[len(incomplete) :]
            rest = rest.replace("-", "_") if "_" in incomplete.rpartition(".")[2] else rest
            items.append(CompletionItem(incomplete + rest, help=text or None))
    return items


def _tree(argv: Sequence[str], control: Sequence[str]) -> Located:
    """Returns what the line so far chooses; completion does not report mistakes in it."""
    with contextlib.suppress(Exception):
        own, flags = take([flag for flag in parse(argv) if flag.value is not None], control)
        line = CommandLine(control, own, flags, None)
        return assemble(line.configs, flags, Problems())
    return Located({}, "")


def _flags(incomplete: str, tree: Located, control: Sequence[str]) -> Iterator[tuple[str, str]]:
    yield from ((f"--{name}", "") for name in control)
    for name, option in known_flags().items():
        yield f"--{name}", PLUGINS.get(name, option.description)
    for info in discover():
        if info.kind in NAMED:
            yield f"--{_dashed(info.name)}", f"the {info.kind}; its options follow a dot"
    for kind, spec, prefix in _plugins(incomplete.removeprefix("--"), tree):
        if kind == "reward":
            yield f"--{_dashed(prefix)}.weight", "factor in the weighted sum"
        yield from ((f"--{prefix}.{option.name.replace('_', '-')}", option.description) for option in _options(kind, spec))


def _plugins(flag: str, tree: Located) -> Iterator[tuple[str, str, str]]:
    """Kind, name and prefix of the plugins whose options the flag, or a beginning of it, may name."""
    known = {name: (kind, name) for name, kind in Names().plugins.items() if _dashed(flag).startswith(f"{_dashed(name)}.")}
    known |= {prefix: (kind, spec) for kind, spec, prefix in chosen_plugins(tree)}
    for prefix, (kind, spec) in known.items():
        if _dashed(flag).startswith(_dashed(prefix.partition(".")[0])):
            yield kind, spec, prefix


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _values(flag: str, incomplete: str, tree: Located) -> list[CompletionItem]:
    kind, settings = kind_of(flag), flag == "config"
    if kind or settings or flag == "disable":
        names = [*named(info for info in discover() if flag == "disable" or info.kind == (kind or "preset"))]
        names += WORDS if kind == "kernels" else [name for name in recipes() if name not in names] if settings else ()
        # alias=name and name,name: what is before the last mark stays.
        done = incomplete[: max(incomplete.rfind("="), incomplete.rfind(",")) + 1]
        items = [CompletionItem(done + name) for name in names if (done + name).startswith(incomplete)]
        return [*items, CompletionItem(incomplete, type="file")] if settings else items
    if flag in DIRECTORIES:
        return [CompletionItem(incomplete, type="dir")]
    if flag in FILES or flag.endswith((".model", ".tokenizer")):
        tasks = named(info for info in discover() if info.kind == "tasks") if flag.endswith("data") else ()
        items = [CompletionItem(name) for name in tasks if name.startswith(incomplete)]
        return [*items, CompletionItem(incomplete, type="file")]
    return [CompletionItem(word) for word in _words(_option(flag, tree)) if word.startswith(incomplete)]


def _option(flag: str, tree: Located) -> Option | None:
    if (option := known_flags().get(flag)) is not None:
        return option
    for kind, spec, prefix in _plugins(flag, tree):
        if _dashed(flag).startswith(f"{_dashed(prefix)}."):
            name = flag[len(prefix) + 1 :].replace("-", "_")
            return next((option for option in _options(kind, spec) if option.name == name), None)
    return None


def _words(option: Option | None) -> list[str]:
    """Returns what the option's type allows, if these are a few words."""
    if option is None:
        return []
    words = re.findall(r"'([^']*)'", option.type)
    kinds = option.type.split(" | ")
    return [*words, *(("true", "false") if "bool" in kinds else ()), *(("none",) if words and "None" in kinds else ())]


def _options(kind: str, spec: str) -> list[Option]:
    """The plugin's options, or none where it cannot be imported in time."""
    options: list[Option] = []

    def look() -> None:
        with contextlib.suppress(Exception, SystemExit):
            options.extend(describe_options(options_model(load(find(kind, spec)))))

    # What an import prints must not reach the shell, which reads our output.
    with quiet():
        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        thread.join(PATIENCE_S)
    return list(options)
