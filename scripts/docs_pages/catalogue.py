"""The page of the catalogue, and the list of the project's plugins that comes with the host."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from rlhf_authoring.certificates import Listed, read
from rlhf_authoring.index import Index, read_index
from rlhf_authoring.signatures import Forged, principal

import rlhf_host
from docs_pages.markdown import code, options_table, table
from rlhf_host import UserError, functional
from rlhf_host.plugins.about import about
from rlhf_host.plugins.catalogue import OTHERS
from rlhf_host.plugins.discovery import GROUPS, HOST, WITHOUT_OPTIONS, PluginInfo, discover, normalised
from rlhf_host.plugins.options import describe_options, options_model
from rlhf_host.plugins.selection import load

ROOT = Path(__file__).resolve().parents[2]

CERTIFICATES = ROOT / "certificates"
"""Certificates of the project's plugins, if it has any."""

FLAGS = {
    "algo": "--algo",
    "reward": "--reward",
    "agent": "--agent",
    "extension": "--with",
    "tasks": "--data",
    "weight_sync": "--sync",
    "tracker": "--tracker",
    "preset": "--config",
    "engine": "--engine",
    "backend": "--backend",
    "runtime": "--runtime",
    "kernels": "--kernels",
    "server": "",
    "data": "",
    "command": "rlhf",
}
"""Kind → what is typed before its name."""

KINDS = {
    "algo": "Algorithms",
    "reward": "Rewards",
    "agent": "Agents",
    "extension": "Extensions",
    "tasks": "Task sources",
    "tracker": "Trackers",
    "weight_sync": "Weight synchronisation",
    "preset": "Presets",
    "engine": "Engines",
    "backend": "Backends",
    "runtime": "Runtimes",
    "kernels": "Kernels",
    "server": "Servers",
    "data": "Data",
    "command": "Commands",
}


def page() -> str:
    found = list(published())
    ours, others = our_index(), read_index(str(OTHERS))
    parts = [
        "# Catalogue",
        "What can be installed. `rlhf plugins search WORD` searches these lists, `rlhf plugins` lists what is installed, and"
        " `rlhf plugins show NAME` prints the details of one.",
        "## What to install { #install }",
        ours.note or "",
        _to_install(ours),
        "## Plugins of others { #others }",
        _to_install(others) if others.distributions else "None is listed yet.",
        "[How to be listed](plugins/index.md#listed) says how yours gets here.",
    ]
    shared = describe_options(functional.PolicyLossOptions)
    for kind, title in KINDS.items():
        rows = [info for info in found if info.kind == kind]
        if not rows:
            continue
        parts += [f"## {title} {{ #{kind} }}", table(("name", "distribution", ""), _listed(kind, rows))]
        if kind == "algo":
            parts += [
                "These are the options of the policy loss. An algorithm has them if its table below says so:",
                options_table(shared),
            ]
        if kind not in WITHOUT_OPTIONS:
            parts += [part for row in rows for part in _options(kind, row)]
    return "\n\n".join(parts)


def projects() -> Iterator[dict[str, Any]]:
    """``[project]`` of every distribution of the repository, the host first."""
    for path in [ROOT / "pyproject.toml", *sorted(ROOT.glob("plugins/*/*/pyproject.toml"))]:
        yield tomllib.loads(path.read_text(encoding="utf-8"))["project"]


def published() -> Iterator[PluginInfo]:
    """Every plugin of the project's distributions, by kind and name as their projects have them."""
    known = {(info.kind, info.name, normalised(info.distribution)): info for info in discover()}
    kinds = {group: kind for kind, group in GROUPS.items()}
    for project in projects():
        for group, points in project.get("entry-points", {}).items():
            if group in kinds:
                yield from (known[kinds[group], name, project["name"]] for name in sorted(points))


def certificates(folder: Path) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Kind, name and distribution → the certificate of each pair of files ``NAME.json`` and ``NAME.json.sig``.

    Raises:
        UserError: a file is no certificate, or not signed by a key of ``allowed_signers`` in the folder, or the second of a plugin.
    """
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for file in sorted(folder.glob("*.json")):
        signed = read(file)
        try:
            name = signed.signature and principal(signed.text, signed.signature, folder / "allowed_signers")
        except Forged as error:
            raise UserError(f"{file}: its signature is not valid: {error}") from error
        about = signed.certificate.plugin
        key = (about.kind, about.name, normalised(about.distribution))
        if not name:
            raise UserError(f"{file}: no key of {folder / 'allowed_signers'} signed it")
        if key[2] == HOST:
            raise UserError(f"{file}: the list is a file of {HOST}, so a certificate of these files cannot be in it")
        if key in found:
            raise UserError(f"{file}: there is another certificate of {signed.certificate.who}")
        found[key] = Listed.of(signed).model_dump(exclude_none=True)
    return found


def our_index(folder: Path = CERTIFICATES) -> Index:
    """What the project publishes, as ``rlhf plugins search`` reads it. Raises ``UserError`` for a certificate of nothing here."""
    certified = certificates(folder)
    plugins: dict[str, list[dict[str, Any]]] = {}
    for info in published():
        said: dict[str, Any] = {"spellings": dict(info.spellings) or None, "recommended": list(info.recommended) or None}
        said["certificate"] = certified.pop((info.kind, info.name, normalised(info.distribution)), None)
        plugins.setdefault(info.distribution, []).append({"kind": info.kind, "name": info.name, "about": about(info), **said})
    if certified:
        raise UserError(
            f"{folder} has certificates of what is not published here: {', '.join(' '.join(key) for key in certified)}"
        )
    entries = []
    for project in projects():
        name, host = project["name"], project["name"] == HOST
        if name not in plugins:
            continue  # what other packages require
        entries.append(
            {
                "name": name,
                "version": rlhf_host.__version__ if host else project["version"],
                "summary": project["description"],
                "api": f"=={rlhf_host.__version__}" if host else _host_range(project["dependencies"]),
                "pip_options": "--find-links dist",
                "plugins": plugins[name],
            }
        )
    note = "No package index has these packages yet: `make wheels`, in a clone of the repository, builds them into `dist`."
    return Index.model_validate({"note": note, "distributions": entries})


def _host_range(requirements: Sequence[str]) -> str:
    """As the project writes it."""
    (stated,) = (text for text in requirements if Requirement(text).name == HOST)
    return re.sub(rf"{HOST}(\[.*?\])?", "", stated)


def _to_install(index: Index) -> str:
    rows = []
    for entry in index.distributions:
        name = f"[{entry.name}]({entry.homepage})" if entry.homepage else code(entry.name)
        plugins = ", ".join(f"{plugin.kind} {code(plugin.name)}" for plugin in entry.plugins)
        rows.append((name, entry.version, code(entry.api), plugins, code(entry.install)))
    return table(("distribution", "version", "for rlhf-host", "plugins", "install"), rows)


def typed(info: PluginInfo) -> str:
    """Returns what chooses the plugin, ``--algo rloo``, or runs the command."""
    return f"{FLAGS[info.kind]} {info.name.replace('.', ' ') if info.kind == 'command' else info.name}".strip()


def _listed(kind: str, rows: Sequence[PluginInfo]) -> Iterator[tuple[str, str, str]]:
    for info in rows:
        summary = re.sub(r"arXiv:(\d{4}\.\d{5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", about(info))
        yield code(typed(info)), code(info.distribution), summary


def _options(kind: str, info: PluginInfo) -> Iterator[str]:
    model = options_model(load(info))
    options = describe_options(model)
    heads = f"### {info.name} {{ #{kind}-{info.name} }}"
    if issubclass(model, functional.PolicyLossOptions):
        inherited = {option.name: option for option in describe_options(functional.PolicyLossOptions)}
        own = [option for option in options if inherited.get(option.name) != option]
        yield heads
        yield (options_table(own) + "\n\nAlso the options of the policy loss." if own else "The options of the policy loss.")
    elif options:
        yield heads
        yield options_table(options)
