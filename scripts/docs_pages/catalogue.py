"""The project's plugins: what its distributions have, and the list of them that comes with the host."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from rlhf_authoring.certificates import Listed, read
from rlhf_authoring.index import Index
from rlhf_authoring.signatures import Forged, principal

import rlhf_host
from rlhf_host import UserError
from rlhf_host.plugins.about import about
from rlhf_host.plugins.discovery import GROUPS, HOST, PluginInfo, discover, normalised

ROOT = Path(__file__).resolve().parents[2]

OPTIONS: str | None = "-c dist/wheels.txt"  # until a package index has them
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


def projects() -> Iterator[dict[str, Any]]:
    """``[project]`` of every distribution of the repository, the host first."""
    for folder in folders().values():
        yield tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def folders() -> dict[str, Path]:
    """Returns name → folder of every distribution of the repository, the host first."""
    return {HOST: ROOT} | {path.parent.name: path.parent for path in sorted(ROOT.glob("plugins/*/*/pyproject.toml"))}


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
    """Returns the project's plugins for ``rlhf plugins search``. Raises ``UserError`` for a certificate of nothing here."""
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
        entries.append(
            {
                "name": name,
                "version": rlhf_host.__version__ if host else project["version"],
                "summary": project["description"],
                "api": f"=={rlhf_host.__version__}" if host else _host_range(project["dependencies"]),
                "pip_options": OPTIONS,
                "plugins": plugins.get(name, []),
            }
        )
    note = "No package index has these packages yet: `make wheels`, in a clone of the repository, builds them into `dist`."
    return Index.model_validate({"note": note if OPTIONS else None, "distributions": entries})


def _host_range(requirements: Sequence[str]) -> str:
    """As the project writes it."""
    (stated,) = (text for text in requirements if Requirement(text).name == HOST)
    return re.sub(rf"{HOST}(\[.*?\])?", "", stated)


def typed(info: PluginInfo) -> str:
    """Returns what chooses the plugin, ``--algo rloo``, or runs the command."""
    return f"{FLAGS[info.kind]} {info.name.replace('.', ' ') if info.kind == 'command' else info.name}".strip()
