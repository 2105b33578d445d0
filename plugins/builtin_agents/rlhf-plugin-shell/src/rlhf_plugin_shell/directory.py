"""Tasks in directories, in Harbor's format: ``instruction.md``, ``task.toml``, ``environment``, ``tests`` and ``solution``.

The format is that of https://github.com/laude-institute/harbor: fields of ``harbor.models.task.config.TaskConfig``, paths of
``TaskPaths`` and ``EnvironmentPaths``. What is not supported is refused by its name.
"""

from __future__ import annotations

import posixpath
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from rlhf_plugin_code_exec.shells import File

from rlhf_plugin_shell.dockerfile import NAME, Built, Unsupported, check_folder, read_dockerfile
from rlhf_plugin_shell.work import TESTS, Work

Place = Literal["plain", "host"]
SOLVE = "solve.sh"
IGNORE = ".harborignore"
MOST_BYTES = 64 << 20
"""Most bytes of the files of a folder."""
TOP = ("schema_version", "version", "task", "metadata", "source", "verifier", "agent", "environment", "solution")
USED = {
    "verifier": ("timeout_sec", "env", "environment_mode", "network_mode"),
    "agent": ("timeout_sec", "network_mode"),
    "environment": (
        *("build_timeout_sec", "docker_image", "os", "cpus", "memory_mb", "memory", "storage_mb", "storage", "env", "workdir"),
        *("network_mode", "allow_internet"),
    ),
    "solution": ("env",),
}
"""Fields that are used; ``task``, ``metadata`` and ``source`` describe a task and may have any."""


def read_directory(given: Any) -> Work:
    """Returns the work of a task in a directory: a path, or an object with ``path`` and ``environment``. Raises ``ValueError``
    with what is wrong or not supported, and ``OSError``.
    """
    place = given if isinstance(given, Mapping) else {"path": given}
    path, environment = place.get("path"), place.get("environment", "plain")
    if not isinstance(path, str) or environment not in get_args(Place):
        raise ValueError(f'harbor is {given!r}; give a path, or {{"path": ..., "environment": "plain" or "host"}}')
    return work_in(Path(path), environment)


def instruction_in(folder: Path) -> str:
    """Returns the prompt of a task. Raises ``ValueError`` and ``OSError``."""
    path = folder / "instruction.md"
    _check_link(folder, path)
    text = path.read_text(encoding="utf-8").strip()
    if not text:
        raise ValueError("instruction.md is empty")
    return text


def work_in(folder: Path, environment: Place) -> Work:
    """Returns the work of the task in a folder.

    Args:
        environment: ``plain``: refuse base images with programs of their own, and commands that build an image; ``host``: use
            this machine's programs, and run these commands in the task's shell.

    Raises ``ValueError`` and ``OSError``.
    """
    settings = read_settings(folder, environment)
    own = settings.get("environment", {})
    built = _built(folder, own, environment)
    workdir = str(own.get("workdir") or built.folder)
    check_folder(workdir)
    tests = files_in(folder / "tests")
    if TESTS not in tests:
        raise Unsupported(f"tests/{TESTS} is missing")
    tests[TESTS] = File(tests[TESTS].content, True)
    verifier, agent = settings.get("verifier", {}), settings.get("agent", {})
    return Work(
        files=_copied(folder / "environment", built, workdir),
        setup="\n".join(["set -e", *built.commands]) if built.commands else "",
        tests=tests,
        folder=workdir,
        only_reported=True,
        variables={**built.variables, **_variables("environment", own)},
        tests_variables=_variables("verifier", verifier),
        seconds=_seconds("agent", agent, "timeout_sec"),
        tests_s=_seconds("verifier", verifier, "timeout_sec"),
        setup_s=_seconds("environment", own, "build_timeout_sec"),
        cpus=_number("environment", own, "cpus"),
        memory_mb=_megabytes(own, "memory"),
        disk_mb=_megabytes(own, "storage"),
    )


def solution_in(folder: Path) -> tuple[dict[str, File], dict[str, str]]:
    """Returns the files of a task's own solution, and its environment variables. Raises ``ValueError`` and ``OSError``."""
    files = files_in(folder / "solution")
    if SOLVE not in files:
        raise Unsupported(f"solution/{SOLVE} is missing")
    files[SOLVE] = File(files[SOLVE].content, True)
    return files, _variables("solution", read_settings(folder, "host").get("solution", {}))


def read_settings(folder: Path, environment: Place) -> dict[str, Any]:
    """Returns ``task.toml``, checked. Raises ``ValueError`` and ``OSError``."""
    path = folder / "task.toml"
    _check_link(folder, path)
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"task.toml: {error}") from error
    version = str(settings.get("schema_version", settings.get("version", "1.0")))
    if not re.match(r"1(\.|$)", version):
        raise Unsupported(f"task.toml: schema_version {version}; 1 is known")
    for name, value in settings.items():
        if name not in TOP and value not in (None, [], {}):
            raise Unsupported(f"task.toml: {name}")
        if name in USED:
            if not isinstance(value, dict):
                raise ValueError(f"task.toml: {name} is no table")
            if unknown := [key for key, each in value.items() if key not in USED[name] and each not in (None, [], {})]:
                raise Unsupported(f"task.toml: {name}.{unknown[0]}")
    _check_values(settings, environment)
    for name in ("trajectory.json", IGNORE, f"tests/{IGNORE}", f"solution/{IGNORE}", "environment/.dockerignore"):
        if (folder / name).exists():
            raise Unsupported(name)
    return settings


def _check_values(settings: Mapping[str, Any], environment: Place) -> None:
    own, verifier = settings.get("environment", {}), settings.get("verifier", {})
    if str(own.get("os", "linux")).lower() != "linux":
        raise Unsupported(f"task.toml: environment.os {own['os']}")
    if verifier.get("environment_mode", "shared") != "shared":
        raise Unsupported(f"task.toml: verifier.environment_mode {verifier['environment_mode']}: tests run beside the work")
    for name in ("environment", "agent", "verifier"):
        if (mode := settings.get(name, {}).get("network_mode", "public")) not in ("public", "no-network"):
            raise Unsupported(f"task.toml: {name}.network_mode {mode}: there is no network")
    if environment == "plain" and own.get("docker_image"):
        raise Unsupported(f"task.toml: environment.docker_image {own['docker_image']}")


def _built(folder: Path, own: Mapping[str, Any], environment: Place) -> Built:
    place = folder / "environment"
    if others := [path.name for path in sorted(place.glob("*compose*"))]:
        raise Unsupported(f"environment/{others[0]}")
    file = place / "Dockerfile"
    _check_link(folder, file)
    if not file.is_file():
        if own.get("docker_image"):
            return Built(str(own["docker_image"]))
        raise Unsupported("environment/Dockerfile is missing")
    built = read_dockerfile(file.read_text(encoding="utf-8"))
    if environment == "plain":
        if not built.is_plain:
            raise Unsupported(f"Dockerfile: FROM {built.image}: its programs are not here")
        if built.commands:
            command = built.commands[0].partition(" && ")[2].strip("\n)")
            raise Unsupported(f"Dockerfile: RUN {command}: no image is built")
    return built


def _copied(folder: Path, built: Built, workdir: str) -> dict[str, File]:
    """Returns the files that COPY puts below the working folder."""
    files: dict[str, File] = {}
    for sources, target in built.copies:
        inside = posixpath.relpath(target, workdir)
        if inside.startswith(".."):
            raise Unsupported(f"Dockerfile: COPY to {target}, which is not below {workdir}")
        for source in sources:
            path = folder / source.lstrip("/")  # the root of sources is this folder
            _check_link(folder.parent, path)
            if any(part == ".." for part in Path(source).parts) or not path.exists():
                raise Unsupported(f"Dockerfile: COPY {source}: it is not in environment/")
            if path.is_dir():
                found = {posixpath.join(inside, name): file for name, file in files_in(path).items()}
            else:
                name = posixpath.join(inside, path.name) if target.endswith("/") or inside == "." else inside
                found = {name: _file(path)}
            files |= {posixpath.normpath(name): file for name, file in found.items()}
    return files


def files_in(folder: Path) -> dict[str, File]:
    """Returns the files below a folder. Raises ``ValueError`` for links, for what is no file, and for too many bytes."""
    _check_link(folder.parent, folder)
    files, total = {}, 0
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            raise Unsupported(f"{path.relative_to(folder.parent)} is a link")
        if path.is_file():
            total += path.stat().st_size
            if total > MOST_BYTES:
                raise Unsupported(f"{folder.name} has more than {MOST_BYTES >> 20} MiB")
            files[path.relative_to(folder).as_posix()] = _file(path)
        elif not path.is_dir():
            raise Unsupported(f"{path.relative_to(folder.parent)} is no file")
    return files


def _check_link(folder: Path, path: Path) -> None:
    """Raises ``ValueError`` if a path below a folder is a link or behind one: a task could have any file of the machine by it."""
    place = folder
    for part in path.relative_to(folder).parts:
        place = place / part
        if place.is_symlink():
            raise Unsupported(f"{place.relative_to(folder)} is a link")


def _file(path: Path) -> File:
    return File(path.read_bytes(), bool(path.stat().st_mode & 0o100))


def _variables(name: str, section: Mapping[str, Any]) -> dict[str, str]:
    given = section.get("env", {})
    if not isinstance(given, dict):
        raise ValueError(f"task.toml: {name}.env is no table")
    for key, value in given.items():
        if not NAME.fullmatch(key) or "\0" in str(value):
            raise ValueError(f"task.toml: {name}.env.{key} is no environment variable")
        if "${" in str(value):
            raise Unsupported(f"task.toml: {name}.env.{key} {value}: variables of yours are not passed on")
    return {str(key): str(value) for key, value in given.items()}


def _number(name: str, section: Mapping[str, Any], key: str) -> float | None:
    value = section.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"task.toml: {name}.{key} {value!r} is no number above 0")
    return float(value)


_seconds = _number


def _megabytes(section: Mapping[str, Any], name: str) -> int | None:
    """Returns a size from its field in MB, or from the older one with a unit."""
    value = _number("environment", section, f"{name}_mb")
    if value is not None or name not in section:
        return None if value is None else max(1, int(min(value, 1 << 40)))
    text = str(section[name]).strip().upper()
    if not (found := re.fullmatch(r"(\d+(?:\.\d+)?)([KMG])", text)):
        raise ValueError(f"task.toml: environment.{name} {section[name]!r}; give a size such as 512M")
    return max(1, int(float(found[1]) * {"K": 1 / 1024, "M": 1, "G": 1024}[found[2]]))
