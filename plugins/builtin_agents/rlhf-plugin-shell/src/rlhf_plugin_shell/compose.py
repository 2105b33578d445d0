"""Compose files of tasks: what is used of them, with the limits of a run. What could reach this machine is refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from rlhf_plugin_shell.dockerfile import Unsupported

MAIN = "main"
"""The service in which commands run."""
TOP = ("services", "networks", "volumes", "name", "version")
SERVICE = (
    *(
        "image",
        "build",
        "command",
        "entrypoint",
        "environment",
        "depends_on",
        "healthcheck",
        "working_dir",
        "expose",
        "networks",
    ),
    *("volumes", "tmpfs", "hostname", "user", "stop_signal", "stop_grace_period", "init", "shm_size", "read_only", "platform"),
)
DROPPED = ("container_name", "ports", "restart", "deploy", "pull_policy", "stdin_open", "tty", "mem_limit", "cpus", "labels")
"""Fields of a service that are not used: names would clash, ports would be this machine's, and limits are the run's."""
BUILD = ("context", "dockerfile", "args", "target")
NETWORK, VOLUME = ("internal", "name", "driver"), ("name",)
LOGS = re.compile(r"^\$\{?HOST_\w+\}?:")
"""Volumes of Harbor for logs: they are folders of the container here."""
MOST_VALUES = 20_000
"""Most values of a file, each as often as aliases name it."""
DEEPEST = 32
"""Most tables and lists within each other."""
_VARIABLE = re.compile(r"\$(?:(\$)|\{([A-Za-z_]\w*)(?::?-([^}$]*))?\}|([A-Za-z_]\w*)|)")


def read_compose(text: str, folder: Path, variables: Mapping[str, str]) -> dict[str, Any]:
    """Returns a compose file as the dict of its services, networks and volumes. Raises ``ValueError`` with what is wrong or not
    supported.

    Args:
        folder: where it is.
        variables: values for ``${NAME}``.
    """
    try:
        given = YAML(typ="safe", pure=True).load(text)
    except (YAMLError, RecursionError, ValueError) as error:
        raise ValueError(f"{error}") from error
    if not isinstance(given, dict) or not isinstance(given.get("services"), dict):
        raise ValueError("it has no services")
    _check_size(given)
    _check_keys(given, TOP, "")
    services = {str(name): _service(str(name), own or {}, folder, variables) for name, own in given["services"].items()}
    services.setdefault(MAIN, {})
    return {
        "services": services,
        "networks": _parts(given, "networks", NETWORK),
        "volumes": _parts(given, "volumes", VOLUME),
    }


def prepared(
    compose: Mapping[str, Any],
    images: Mapping[str, str],
    limits: Mapping[str, Any],
    labels: Mapping[str, str],
    stays: Sequence[str],
    network: bool,
) -> dict[str, Any]:
    """Returns a compose file that can be started: services with images, limits and labels, without what builds.

    Args:
        images: service → image, which is there.
        limits: fields of every service.
        stays: the command of the main service.
        network: services reach other machines.
    """
    services = {}
    for name, given in compose["services"].items():
        own = {key: value for key, value in given.items() if key not in ("build", "image")}
        services[name] = {**own, **limits, "image": images[name], "labels": dict(labels), "pull_policy": "never"}
    services[MAIN] |= {"entrypoint": list(stays[:1]), "command": list(stays[1:])}
    services[MAIN].pop("healthcheck", None)
    networks = {"default": {}, **compose["networks"]}
    inside = {} if network else {"internal": True}
    return {
        "services": services,
        "networks": {name: {**(own or {}), **inside, "labels": dict(labels)} for name, own in networks.items()},
        "volumes": {name: {"labels": dict(labels)} for name in compose["volumes"]},
    }


def _service(name: str, given: Any, folder: Path, variables: Mapping[str, str]) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise ValueError(f"services.{name} is no table")
    _check_keys(given, (*SERVICE, *DROPPED), f"services.{name}.")
    own = {
        key: _expanded(value, variables, f"services.{name}.{key}")
        for key, value in given.items()
        if key not in (*DROPPED, "volumes")
    }
    named = given.get("volumes") or []
    if not isinstance(named, list):
        raise ValueError(f"services.{name}.volumes is no list")
    volumes = [_volume(name, each) for each in named if not LOGS.match(str(each))]
    if volumes:
        own["volumes"] = volumes
    if "build" in own:
        own["build"] = _build(name, own["build"], folder)
    elif name != MAIN and not own.get("image"):
        raise ValueError(f"services.{name} has no image")
    return own


def _volume(service: str, given: Any) -> str:
    """Returns a volume of the task's own. Folders of this machine are refused."""
    where = f"services.{service}.volumes"
    if not isinstance(given, str) or "$" in given:
        raise Unsupported(f"{where}: {given}: only NAME:/path")
    name, _, _ = given.partition(":")
    if "/" in name or name.startswith((".", "~")) or ":" not in given:
        raise Unsupported(f"{where}: {given}: a folder of this machine; only NAME:/path")
    return given


def _build(service: str, given: Any, folder: Path) -> dict[str, Any]:
    own = {"context": given} if isinstance(given, str) else given
    if not isinstance(own, dict):
        raise ValueError(f"services.{service}.build is no table")
    _check_keys(own, BUILD, f"services.{service}.build.")
    context = (folder / str(own.get("context", "."))).resolve()
    file = (context / str(own.get("dockerfile", "Dockerfile"))).resolve()
    for path in (context, file):
        if not path.is_relative_to(folder.resolve()):
            raise Unsupported(f"services.{service}.build: {path} is not in environment/")
    if not file.is_file():
        raise ValueError(f"services.{service}.build: {file.name} is missing")
    arguments = own.get("args") or {}
    if isinstance(arguments, list):
        arguments = dict(str(each).partition("=")[::2] for each in arguments)
    if not isinstance(arguments, dict):
        raise ValueError(f"services.{service}.build.args is neither a table nor a list")
    args = {str(key): "" if value is None else str(value) for key, value in arguments.items()}
    return {"context": context, "file": file, "args": args, "target": str(own.get("target") or "")}


def _parts(given: Mapping[str, Any], key: str, known: Sequence[str]) -> dict[str, Any]:
    parts = given.get(key) or {}
    if not isinstance(parts, dict):
        raise ValueError(f"{key} is no table")
    made = {}
    for name, own in parts.items():
        if not isinstance(own or {}, dict):
            raise ValueError(f"{key}.{name} is no table")
        _check_keys(own or {}, known, f"{key}.{name}.")
        if (own or {}).get("driver", "bridge") != "bridge":
            raise Unsupported(f"{key}.{name}.driver {own['driver']}")
        made[str(name)] = {field: value for field, value in (own or {}).items() if field == "internal"}
    return made


def _check_size(given: Any) -> None:
    """Raises ``ValueError`` for more values than are read: aliases may be of others, and of themselves."""
    values, left = 0, [(given, 0)]
    while left:
        each, depth = left.pop()
        inner = [*each.values()] if isinstance(each, dict) else each if isinstance(each, list) else []
        values += len(inner)
        if values > MOST_VALUES or depth > DEEPEST:
            raise ValueError(f"it has more than {MOST_VALUES:,} values, or {DEEPEST} tables and lists within each other")
        left += [(value, depth + 1) for value in inner]


def _check_keys(given: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for key, value in given.items():
        if key not in known and not str(key).startswith("x-") and value not in (None, [], {}, False):
            raise Unsupported(f"{where}{key}")


def _expanded(value: Any, variables: Mapping[str, str], where: str) -> Any:
    """Returns a value with its variables in place."""
    if isinstance(value, dict):
        return {key: _expanded(each, variables, where) for key, each in value.items()}
    if isinstance(value, list):
        return [_expanded(each, variables, where) for each in value]
    if not isinstance(value, str):
        return value

    def found(match: re.Match[str]) -> str:
        if match[1]:
            return "$"
        name = match[2] or match[4]
        if not name:
            raise Unsupported(f"{where}: {value}: a $ that stands for nothing; $$ is a $")
        if name not in variables and match[3] is None:
            raise Unsupported(f"{where}: {value}: variables of yours are not passed on")
        return variables.get(name) or match[3] or ""

    return _VARIABLE.sub(found, value)


def escaped(value: Any) -> Any:
    """Returns a value in which no text is a variable for ``docker compose``."""
    turned: Callable[[Any], Any] = escaped
    if isinstance(value, dict):
        return {key: turned(each) for key, each in value.items()}
    if isinstance(value, list):
        return [turned(each) for each in value]
    return value.replace("$", "$$") if isinstance(value, str) else value
