"""The pages of commands: the help of each as tables; one page for each word that follows ``rlhf``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import groupby

import click
from click.testing import CliRunner

from docs_pages.catalogue import published
from docs_pages.markdown import code, table
from rlhf_host.cli.main import main as command_line
from rlhf_host.plugins.discovery import DISABLE, discover

_SECTION = re.compile(r"^(?P<title>[A-Z].*):$")
_ENTRY = re.compile(r"^  (?P<term>\S.*?)(?:  +(?P<text>\S.*))?$")
_MORE = re.compile(r"^   +(?P<text>\S.*)$")


def pages() -> dict[str, str]:
    """Returns path below ``docs/reference`` → page."""
    paths = [path for path in command_paths() if path]
    found = {f"commands/{name}.md": _page(list(each)) for name, each in groupby(paths, key=lambda path: path[0])}
    return {"commands.md": _index(), **found}


def _index() -> str:
    """The list of the commands, in the groups of ``rlhf --help``."""
    parts = ["# Commands", "`rlhf COMMAND --help` prints the same, with the options of the plugins that are chosen."]
    for title, entries in sections(help_text(())):
        if title != "Options":
            rows = [(f"[`rlhf {name}`](commands/{name}.md)", about) for name, about in entries]
            parts += [f"## {title}", table(("command", ""), rows)]
    return "\n\n".join(parts)


def _page(paths: Sequence[tuple[str, ...]]) -> str:
    """The page of a command, with the commands of its group."""
    parts = list[str]()
    for path in paths:
        head, *rest = help_text(path).split("\n\n")
        about = [" ".join(text.split()) for text in rest if not _SECTION.match(text.splitlines()[0])]
        parts += [f"{'#' if path == paths[0] else '##'} {shown(path)}", f"```text\n{head}\n```", *map(_plain, about)]
        for title, entries in sections(help_text(path)):
            if title == "Example":
                parts += ["```sh\n" + "\n".join(term for term, _ in entries) + "\n```"]
                continue
            rows = [(", ".join(map(code, term.split(", "))), about) for term, about in entries]
            parts += [f"**{title}**", table(("command" if title == "Commands" else "option", ""), rows)]
    return "\n\n".join([*parts, "[All commands](../commands.md)"])


def _plain(text: str) -> str:
    return text.replace("<", "&lt;").replace("*", r"\*")


def shown(path: Sequence[str]) -> str:
    return " ".join(("rlhf", *path))


def sections(text: str) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yields the titles of a help text's sections, each with its entries: the term and what is said of it."""
    title, entries = "", list[tuple[str, str]]()
    for line in text.splitlines():
        if start := _SECTION.match(line):
            if title:
                yield title, entries
            title, entries = start["title"], []
        elif title and (more := _MORE.match(line)):
            term, said = entries[-1]
            entries[-1] = term, f"{said} {more['text']}".strip()
        elif title and (entry := _ENTRY.match(line)):
            whole = title == "Example"
            entries.append((line.strip(), "") if whole else (entry["term"], entry["text"] or ""))
        elif title and line:
            raise RuntimeError(f"a line of the section {title!r} is no entry: {line!r}")
    if title:
        yield title, entries


def command_paths() -> list[tuple[str, ...]]:
    """Every command, as the words that follow ``rlhf``; the group itself first."""
    return list(_walk(command_line, ()))


def _walk(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    if getattr(command, "hidden", False):
        return
    yield path
    if isinstance(command, click.Group):
        context = click.Context(command, info_name="rlhf")
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            if inner is not None:
                yield from _walk(inner, (*path, name))


@cache
def help_text(path: tuple[str, ...]) -> str:
    own = {info.distribution for info in published()}
    others = ",".join(f"{info.distribution}:{info.name}" for info in discover() if info.distribution not in own)
    found = CliRunner().invoke(command_line, [*path, "--help"], env={"COLUMNS": "100", DISABLE: others}, prog_name="rlhf")
    if found.exit_code:
        raise RuntimeError(f"rlhf {' '.join(path)} --help failed: {found.output}")
    return found.output.rstrip()
