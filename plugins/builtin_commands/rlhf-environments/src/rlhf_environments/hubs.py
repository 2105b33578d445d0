"""Environments of other projects, as pip finds them: on the hub of verifiers, among OpenEnv's spaces, and in NeMo Gym's package."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_host import RunError, UserError
from rlhf_host.commands import near_matches

HUBS = ("verifiers", "openenv", "nemo-gym")
FORMS = "verifiers:OWNER/NAME or verifiers:PACKAGE, openenv:OWNER/SPACE or openenv:PACKAGE, nemo-gym:NAME"
VERIFIERS_INDEX = "https://hub.primeintellect.ai/{owner}/simple/"
OPENENV_SPACE = "git+https://huggingface.co/spaces/{owner}/{name}"
GYM = "nemo-gym"
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
FIND_S = 300.0

_LIST = """
import importlib.metadata as metadata, importlib.util, json, pathlib, re
found = []
for each in metadata.distributions():
    needs = {re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0].lower().replace("_", "-") for line in each.requires or ()}
    for hub, wanted in (("verifiers", {"verifiers"}), ("openenv", {"openenv", "openenv-core"})):
        if needs & wanted and each.metadata["Name"].lower() not in ("verifiers", "openenv", "openenv-core"):
            found.append({"hub": hub, "name": each.metadata["Name"], "version": each.version})
spec = importlib.util.find_spec("nemo_gym")
if spec is not None:
    version = metadata.version("nemo-gym")
    for app in sorted(pathlib.Path(spec.origin).parents[1].glob("resources_servers/*/app.py")):
        found.append({"hub": "nemo-gym", "name": app.parent.name, "version": version})
print(json.dumps(sorted(found, key=lambda one: (one["hub"], one["name"]))))
"""


@dataclass(frozen=True, slots=True)
class Wanted:
    """An environment by its hub and name, and what pip is asked for."""

    hub: str
    name: str
    words: tuple[str, ...]
    """Names that pip installs, with the index that has them."""


def wanted(spec: str) -> Wanted:
    """Returns what a name such as ``verifiers:OWNER/NAME`` means. Raises ``UserError``."""
    hub, colon, place = spec.partition(":")
    if not colon or hub not in HUBS:
        near = near_matches(hub, HUBS) if colon else ""
        raise UserError(f"{spec}: begins with no hub: {FORMS}{near}")
    place, _, version = place.partition("@")
    owner, slash, name = place.rpartition("/")
    if not _NAME.fullmatch(name) or (slash and not _NAME.fullmatch(owner)) or (version and not _NAME.fullmatch(version)):
        raise UserError(f"{spec}: {place!r} is no name: {FORMS}")
    exact = f"{name}=={version}" if version else name
    if hub == "nemo-gym":
        if slash:
            raise UserError(f"{spec}: environments of NeMo Gym have no owner: nemo-gym:NAME")
        return Wanted(hub, name, (f"{GYM}=={version}" if version else GYM,))
    if not slash:
        return Wanted(hub, name, (exact,))
    if hub == "verifiers":
        return Wanted(hub, name, ("--extra-index-url", VERIFIERS_INDEX.format(owner=owner), exact))
    at = f"@{version}" if version else ""
    return Wanted(hub, name, (OPENENV_SPACE.format(owner=owner, name=name) + at,))


def found(asked: Wanted, python: str) -> list[dict[str, str]]:
    """Returns what pip would install: name, version and address of each. Raises ``UserError`` where nothing is found."""
    words = ("install", "--dry-run", "--quiet", "--report", "-", *asked.words)
    code, out, problems = _pip(python, words)
    if code:
        last = next((line for line in reversed(problems.splitlines()) if line.startswith("ERROR")), problems.strip()[-300:])
        raise UserError(f"{asked.hub}:{asked.name}: {_hub(asked)} has none that can be installed, or cannot be reached: {last}")
    try:
        installs: list[dict[str, Any]] = json.loads(out)["install"]
    except (ValueError, KeyError) as error:
        raise RunError(f"pip of {python} gives no report: it needs pip 23 or newer") from error
    return [
        {
            "name": each["metadata"]["name"],
            "version": each["metadata"]["version"],
            "from": each.get("download_info", {}).get("url", ""),
        }
        for each in installs
    ]


def install(asked: Wanted, python: str) -> None:
    """Installs it. Raises ``RunError`` where pip does not, and ``UserError`` for a NeMo Gym without that environment."""
    code, _, problems = _pip(python, ("install", "--quiet", *asked.words))
    if code:
        raise RunError(f"pip failed with exit code {code}: {problems.strip()[-500:]}")
    if asked.hub == "nemo-gym":
        names = [one["name"] for one in installed(python) if one["hub"] == "nemo-gym"]
        if asked.name not in names:
            near = near_matches(asked.name, names) or f"; it has {len(names)} (rlhf env list)"
            raise UserError(f"nemo-gym:{asked.name}: the installed NeMo Gym has none{near}")


def installed(python: str) -> list[dict[str, str]]:
    """Returns the environments that a Python has: hub, name and version."""
    result = _run([python, "-c", _LIST])
    if result.returncode:
        raise RunError(f"{python}: {result.stderr.strip()[-300:]}")
    told: list[dict[str, str]] = json.loads(result.stdout)
    return told


def checked(python: str) -> str:
    """Returns the path of an interpreter. Raises ``UserError`` for none."""
    path = str(Path(python).expanduser())
    if not os.access(path, os.X_OK) or os.path.isdir(path):
        raise UserError(f"--python {python}: there is no such interpreter: python -m venv DIR makes DIR/bin/python")
    return path


def _hub(asked: Wanted) -> str:
    return next((word for word in asked.words if "://" in word), "the package index")


def _pip(python: str, words: Sequence[str]) -> tuple[int, str, str]:
    result = _run([python, "-m", "pip", "--disable-pip-version-check", *words])
    if "No module named pip" in result.stderr:
        raise UserError(f"--python {python}: it has no pip: {python} -m ensurepip")
    return result.returncode, result.stdout, result.stderr


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        variables = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "PIP_NO_INPUT": "1"}
        return subprocess.run(command, check=False, capture_output=True, text=True, timeout=FIND_S, env=variables)
    except subprocess.TimeoutExpired as error:
        raise RunError(f"{' '.join(command[:4])} gave no answer in {FIND_S:g} s: the hub cannot be reached") from error
    except OSError as error:
        raise UserError(f"{command[0]} cannot be started: {error.strerror}") from error
