"""``rlhf plugins search``: what could be installed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import click

from rlhf_authoring.certificates import told
from rlhf_authoring.index import Index, ListedDistribution, ListedPlugin, read_index, shipped
from rlhf_host import __version__
from rlhf_host.commands import kind_option, near_matches, wrap
from rlhf_host.installed import GROUPS, PluginInfo, discover, normalised

Infos: TypeAlias = dict[tuple[str, str, str], PluginInfo]
"""Kind, name and normalised distribution → what is installed."""


class Match(NamedTuple):
    """A distribution, and those of its plugins that were looked for."""

    entry: ListedDistribution
    plugins: list[ListedPlugin]


@click.command()
@click.argument("words", nargs=-1, metavar="[WORD]...")
@kind_option(f"Only this kind: {', '.join(GROUPS)}.")
@click.option("--index", metavar="FILE|URL", help="Search this list in place of those that come with rlhf.")
@click.option("--json", "as_json", is_flag=True, help="Print a list of objects, one for each plugin.")
def search(words: Sequence[str], kind: str | None, index: str | None, as_json: bool) -> None:
    """List plugins that could be installed, ours and those of others: all, or those that have every WORD.

    A WORD is looked for in the names of plugins and distributions, in kinds and in what plugins say of themselves.
    Upper and lower case are the same. Nothing is installed; the line that installs a distribution stands below it. Of a certificate
    in the list, the signature is checked, and its files are compared with those that are installed.
    """
    indexes = shipped() if index is None else (read_index(index),)
    matches = [(index, match) for index in indexes for match in _search(index, words, kind)]
    infos = {(info.kind, info.name, normalised(info.distribution)): info for info in discover(disabled=True)}
    installed = {distribution: info.version for (_, _, distribution), info in infos.items()}
    if as_json:
        rows = [row for _, match in matches for row in _rows(match, installed, infos)]
        click.echo(json.dumps(rows, indent=2))
        return
    if not matches:
        click.echo(f"Nothing found{_near(indexes, words, kind)}")
        return
    width = shutil.get_terminal_size().columns
    for _, match in matches:
        click.echo("\n".join([*_description(match, installed, infos, width), ""]))
    for note in dict.fromkeys(index.note for index, _ in matches if index.note):
        click.echo("\n".join(wrap(note, width)))


def _search(index: Index, words: Sequence[str], kind: str | None) -> Iterator[Match]:
    """Distributions with a plugin that has all words, and is of the kind."""
    for entry in index.distributions:
        plugins = [
            plugin
            for plugin in entry.plugins
            if kind in (None, plugin.kind) and all(word.casefold() in _text(entry, plugin) for word in words)
        ]
        if plugins:
            yield Match(entry, plugins)


def _text(entry: ListedDistribution, plugin: ListedPlugin) -> str:
    return "\n".join((plugin.kind, plugin.name, plugin.about, entry.name, entry.summary)).casefold()


def _near(indexes: Sequence[Index], words: Sequence[str], kind: str | None) -> str:
    """Names like a word that nothing has."""
    listed = [match for index in indexes for match in _search(index, (), kind)]
    names = dict.fromkeys(name for entry, plugins in listed for name in (entry.name, *(plugin.name for plugin in plugins)))
    unknown = (word for word in words if not any(match for index in indexes for match in _search(index, (word,), kind)))
    return next(filter(None, (near_matches(word.casefold(), names) for word in unknown)), "")


def _certified(entry: ListedDistribution, plugin: ListedPlugin, infos: Infos) -> str | None:
    """Returns what the plugin's certificate says, as far as it can be verified here."""
    if plugin.certificate is None:
        return None
    return told(plugin.certificate, plugin, entry.name, infos.get((plugin.kind, plugin.name, normalised(entry.name))))


def _rows(match: Match, installed: dict[str, str], infos: Infos) -> Iterator[dict[str, object]]:
    entry = match.entry
    for plugin in match.plugins:
        yield {
            **plugin.model_dump(include={"kind", "name", "about"}),
            "distribution": entry.name,
            "version": entry.version,
            "api": entry.api,
            "fits": entry.fits,
            "installed": installed.get(normalised(entry.name)),
            "homepage": entry.homepage,
            "install": entry.install,
            "certificate": _certified(entry, plugin, infos),
        }


def _description(match: Match, installed: dict[str, str], infos: Infos, width: int) -> Iterator[str]:
    entry = match.entry
    version = installed.get(normalised(entry.name))
    state = "not installed" if version is None else "installed" if version == entry.version else f"{version} is installed"
    misfit = "" if entry.fits else f", not for this rlhf-host {__version__}"
    yield from wrap(f"{entry.name} {entry.version}, for rlhf-host {entry.api}{misfit}: {state}", width, indent="  ")
    sizes = [max(len(texts) for texts in column) for column in zip(*((p.kind, p.name) for p in match.plugins), strict=True)]
    for plugin in match.plugins:
        head = f"  {plugin.kind.ljust(sizes[0])}  {plugin.name.ljust(sizes[1])}  "
        yield from wrap(plugin.about, width, head, " " * len(head))
        if text := _certified(entry, plugin, infos):
            yield from wrap(text, width, " " * len(head), " " * len(head))
    for text in filter(None, (entry.homepage, entry.install)):
        yield f"  {text}"
