"""``rlhf plugins install`` and ``uninstall``: by pip, into the environment this command runs in."""

from __future__ import annotations

import importlib.util
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rlhf_host import RunError, UserError, __version__
from rlhf_host.commands import matching, near_matches
from rlhf_host.installed import HOST, PluginInfo, discover, normalised, offered

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

ARCHIVES = (".whl", ".tar.gz", ".zip")


def _complete_published(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Plugins and distributions that are listed, or a path."""
    from click.shell_completion import CompletionItem

    return [*matching(_published(), incomplete), CompletionItem(incomplete, type="file")]


def _complete_installed(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Plugins and their distributions, the host's own left out."""
    others = [info for info in discover(disabled=True) if normalised(info.distribution) != HOST]
    names = {info.name: info.distribution for info in others} | {info.distribution: "" for info in others}
    return matching(names, incomplete)


@click.command()
@click.argument("names", nargs=-1, required=True, shell_complete=_complete_published)
@click.option("--upgrade", "-U", is_flag=True, help="Install a newer version if there is one.")
@click.option("--find-links", metavar="DIR", help="Look for wheels there too, as pip does: what make wheels has built.")
@click.option("--dry-run", is_flag=True, help="Print the pip command and stop.")
def install(names: Sequence[str], upgrade: bool, find_links: str | None, dry_run: bool) -> None:
    """Install plugins with pip, into the environment that rlhf runs in.

    NAMES are plugins that rlhf plugins search lists (grpo), their distributions (rlhf-plugin-grpo), or paths of folders and
    wheels. Other names are refused, because a package with that name on a package index may belong to anybody.
    """
    targets = list(dict.fromkeys(_target(name) for name in names))
    # Naming the host keeps pip from replacing it with the version that a plugin was made for.
    flags = [*(["--upgrade"] if upgrade else []), *(["--find-links", find_links] if find_links else [])]
    command = _pip("install", *flags, *targets, f"{HOST}=={__version__}")
    if dry_run:
        click.echo(shlex.join(command))
        return
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


def _published() -> dict[str, str]:
    """Plugin or distribution that is listed → what pip is to install."""
    offers = {name: offer for plugins in offered().values() for name, offer in plugins.items()}
    names = {name: offer.wanted for name, offer in offers.items()}
    return names | {normalised(offer.distribution): offer.wanted for offer in offers.values()}


def _target(name: str) -> str:
    """Returns what pip is to install."""
    path = Path(name).expanduser()
    published = _published()
    known = published.get(name) or published.get(normalised(name))
    looks_like_a_path = any(mark in name for mark in "/\\") or name.endswith(ARCHIVES) or name.startswith(".")
    if known and not looks_like_a_path:
        return known
    if path.is_file() and name.endswith(ARCHIVES):
        return str(path)
    if path.is_dir():
        if not any((path / file).is_file() for file in ("pyproject.toml", "setup.py")):
            raise UserError(f"{name} is not a distribution: it has no pyproject.toml")
        # pip takes a bare word for a name on the index.
        return str(path) if path.is_absolute() else name if name.startswith(".") else f"./{name}"
    if looks_like_a_path:
        raise UserError(f"{name}: no such folder or wheel")
    near = near_matches(name, published)
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
