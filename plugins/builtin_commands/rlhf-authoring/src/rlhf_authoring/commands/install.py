"""``rlhf plugins install`` and ``uninstall``: by pip, into the environment this command runs in."""

from __future__ import annotations

import importlib.util
import itertools
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rlhf_host import RunError, UserError, __version__
from rlhf_host.commands import matching, near_matches
from rlhf_host.installed import HOST, Offer, PluginInfo, discover, install_line, normalised, offered

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

ARCHIVES = (".whl", ".tar.gz", ".zip")
WHEELS = "wheels.txt"
"""The file that ``make wheels`` writes beside wheels, and that holds pip to them."""


def _complete_published(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Plugins and distributions that are listed, or a path."""
    from click.shell_completion import CompletionItem

    return [
        *matching({name: offer.wanted for name, offer in _published().items()}, incomplete),
        CompletionItem(incomplete, type="file"),
    ]


def _complete_installed(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Plugins and their distributions, the host's own left out."""
    others = [info for info in discover(disabled=True) if normalised(info.distribution) != HOST]
    names = {info.name: info.distribution for info in others} | {info.distribution: "" for info in others}
    return matching(names, incomplete)


@click.command()
@click.argument("names", nargs=-1, required=True, shell_complete=_complete_published)
@click.option("--upgrade", "-U", is_flag=True, help="Install a newer version if there is one.")
@click.option(
    "--find-links",
    metavar="DIR",
    help="Take the project's own from this folder or address, which make wheels has filled. [default: dist]",
)
@click.option("--dry-run", is_flag=True, help="Print the pip command and stop.")
def install(names: Sequence[str], upgrade: bool, find_links: str | None, dry_run: bool) -> None:
    """Install plugins with pip, into the environment that rlhf runs in.

    NAMES are plugins that rlhf plugins search lists (grpo), their distributions (rlhf-plugin-grpo), or paths of folders and
    wheels. Other names are refused, because a package with that name on a package index may belong to anybody.
    """
    known = {name: _offer(name) for name in names if not _looks_like_a_path(name)}
    targets = list(dict.fromkeys(offer.wanted if (offer := known.get(name)) else _target(name) for name in names))
    wanted = [*(["--upgrade"] if upgrade else []), *targets]
    words = _from_folder(find_links, wanted) if find_links else shlex.split(install_line(*wanted))[1:]
    # Naming the host keeps pip from replacing it with the version that a plugin was made for.
    command = _pip(*words, f"{HOST}=={__version__}")
    if dry_run:
        click.echo(shlex.join(command))
        return
    _refuse_without_wheels(words)
    before = {(info.kind, info.name, info.distribution, info.version) for info in discover(disabled=True)}
    _run(command)
    importlib.invalidate_caches()
    new = [i for i in discover(disabled=True) if (i.kind, i.name, i.distribution, i.version) not in before]
    for info in new:
        click.echo(f"{info.kind} {info.name} from {info.source}: {info.problem or info.status}")
    if not new:
        click.echo("Nothing new: rlhf plugins lists what is installed.")


@click.command()
@click.argument("names", nargs=-1, required=True, shell_complete=_complete_installed)
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Print the pip command and stop.")
def uninstall(names: Sequence[str], yes: bool, dry_run: bool) -> None:
    """Uninstall the distributions of plugins with pip. NAMES are plugins or distributions.

    A distribution is removed as a whole, with all its plugins. To ignore a single plugin, use --disable.
    """
    known = discover(disabled=True)
    targets = list(dict.fromkeys(_owner(name, known) for name in names))
    command = _pip("uninstall", "--yes", *targets)
    if dry_run:
        click.echo(shlex.join(command))
        return
    for target in targets:
        lost = ", ".join(f"{info.kind} {info.name}" for info in known if info.distribution == target)
        click.echo(f"{target} will be removed, with {lost}")
    if not yes:
        click.confirm("Continue?", abort=True)
    _run(command)


def _published() -> dict[str, Offer]:
    """Plugin or distribution that is listed → how it is installed. A name of several distributions has one of them."""
    offers = {name: offer for plugins in offered().values() for name, offer in plugins.items()}
    return offers | {normalised(offer.distribution): offer for plugins in offered().values() for offer in plugins.values()}


def _offer(name: str) -> Offer | None:
    """Finds how a listed plugin or distribution is installed. Raises ``UserError`` for a name that plugins of several have."""
    owners = {offer.distribution for plugins in offered().values() if (offer := plugins.get(name))}
    if len(owners) > 1:
        raise UserError(f"{name!r} comes with {' and '.join(sorted(owners))}: give the distribution")
    offers = _published()
    return offers.get(name) or offers.get(normalised(name))


def _from_folder(folder: str, wanted: Sequence[str]) -> list[str]:
    """Returns the words for pip that hold it to the wheels of a folder, or of an address."""
    links = ["--find-links", folder] if "://" in folder else []
    return ["install", *links, "-c", f"{folder.rstrip('/')}/{WHEELS}", *wanted]


def _refuse_without_wheels(words: Sequence[str]) -> None:
    """Raises ``UserError`` where the folder of wheels is not there, or has another version of the host than this one."""
    for flag, place in itertools.pairwise(words):
        path = Path(place)
        if flag not in ("-c", "--find-links") or "://" in place:
            continue
        if not path.exists():
            raise UserError(f"no {place} is here: make wheels, in a clone, writes it; --find-links DIR names another folder")
        pinned = re.search(rf"^{HOST}==(.+)$", path.read_text(encoding="utf-8"), re.M) if path.is_file() else None
        if pinned and pinned[1] != __version__:
            raise UserError(
                f"{place} has {HOST} {pinned[1]}, with which pip would replace this one, {__version__}; in a clone, make setup"
                " installs all plugins"
            )


def _looks_like_a_path(name: str) -> bool:
    return any(mark in name for mark in "/\\") or name.endswith(ARCHIVES) or name.startswith(".")


def _target(name: str) -> str:
    """Returns what pip is to install for a name that is not listed: a path."""
    path = Path(name).expanduser()
    if path.is_file() and name.endswith(ARCHIVES):
        return str(path)
    if path.is_dir():
        if not any((path / file).is_file() for file in ("pyproject.toml", "setup.py")):
            raise UserError(f"{name} is not a distribution: it has no pyproject.toml")
        # pip takes a bare word for a name on the index.
        return str(path) if path.is_absolute() else name if name.startswith(".") else f"./{name}"
    if _looks_like_a_path(name):
        raise UserError(f"{name}: no such folder or wheel")
    near = near_matches(name, _published())
    advice = near or "; install what others publish with pip, by a name you have checked"
    raise UserError(f"{name!r} is not in the catalogue{advice}")


def _owner(name: str, known: Iterable[PluginInfo]) -> str:
    """The distribution that a plugin's or distribution's name means."""
    owners = {info.distribution for info in known if info.goes_by(name) or normalised(info.distribution) == normalised(name)}
    if not owners:
        names = sorted(
            {name for info in known if normalised(info.distribution) != HOST for name in (info.name, info.distribution)}
        )
        raise UserError(f"{name!r} is not installed{near_matches(name, names) or '; rlhf plugins lists what is'}")
    if len(owners) > 1:
        raise UserError(f"{name!r} comes with {' and '.join(sorted(owners))}: give the distribution")
    (owner,) = owners
    if normalised(name) == HOST:
        raise UserError(f"{HOST} is no plugin: pip uninstall {HOST} removes it, and all plugins are without a host then")
    if normalised(owner) == HOST:
        raise UserError(f"{name!r} is part of {HOST} itself; --disable {name} leaves it out")
    return owner


def _pip(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pip", *arguments]


def _run(command: Sequence[str]) -> None:
    """Raises ``RunError`` when pip does not do it."""
    if importlib.util.find_spec("pip") is None:
        raise RunError(f"this environment has no pip: {shlex.quote(sys.executable)} -m ensurepip, or use the tool that made it")
    click.echo(f"$ {shlex.join(command)}")
    code = subprocess.run(command, check=False).returncode
    if code:
        raise RunError(f"pip failed with exit code {code}")
