"""Tasks in directories, in Harbor's format: ``instruction.md``, ``task.toml``, ``environment``, ``tests`` and ``solution``.

The format is that of https://github.com/laude-institute/harbor: fields of ``harbor.models.task.config.TaskConfig``, paths of
``TaskPaths`` and ``EnvironmentPaths``. What is not supported is refused by its name.
"""

from __future__ import annotations

import os
import posixpath
import re
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

from rlhf_plugin_code_exec.shells import LONGEST_COMMAND, File

from rlhf_plugin_shell.compose import MAIN, read_compose
from rlhf_plugin_shell.dockerfile import NAME, Built, Unsupported, check_folder, read_dockerfile
from rlhf_plugin_shell.work import MOST_PARTS, TESTS, Work

Place = Literal["plain", "host", "container"]
SOLVE = "solve.sh"
IGNORE = ".harborignore"
COMPOSE = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
MOST_BYTES = 64 << 20
"""Most bytes of the files of a folder, and of all that COPY puts somewhere."""
MOST_TEXT = 256 << 10
"""Most bytes of ``instruction.md``, ``task.toml`` and ``Dockerfile``."""
MOST_FILES = 100_000
MOST_TOLD = 300
"""Most characters of what is wrong."""
DEEPEST = 32
"""Most tables and lists within each other."""
MOST_VARIABLES = 100_000
"""Most bytes of the environment variables of a command."""
_DEEP_KEY = re.compile(rf"""(?<![\w"'-])(?:(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){{{DEEPEST}}}""")
RANGES = {
    "timeout_sec": (0.1, 1e7),
    "build_timeout_sec": (0.1, 1e7),
    "cpus": (0.01, 4096),
    "memory": (16, 1e8),
    "storage": (1, 1e9),
}
"""Field → its smallest and largest value, in seconds, processors and MB."""
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
        raise ValueError(f'harbor is {given!r}; give a path, or {{"path": ..., "environment": "plain", "host" or "container"}}')
    return work_in(Path(path), environment)


def instruction_in(folder: Path) -> str:
    """Returns the prompt of a task. Raises ``ValueError`` and ``OSError``."""
    text = _text(folder, "instruction.md").strip()
    if not text:
        raise ValueError("instruction.md is empty")
    return text


def work_in(folder: Path, environment: Place) -> Work:
    """Returns the work of the task in a folder.

    Args:
        environment: ``plain``: refuse base images with programs of their own, and commands that build an image; ``host``: use
            this machine's programs, and run these commands in the task's shell; ``container``: leave all of this to an image.

    Raises ``ValueError`` and ``OSError``.
    """
    settings = read_settings(folder, environment)
    own = settings.get("environment", {})
    workdir = str(own.get("workdir") or "")
    if environment == "container":
        if workdir and (not posixpath.isabs(workdir) or not workdir.isprintable()):
            raise Unsupported(f"the working folder is {workdir}; it is an absolute path, such as /app (environment.workdir)")
        return replace(_work(folder, settings, workdir, Built()), **_image(folder, own, settings))
    built = _built(folder, own, environment)
    workdir = workdir or built.folder
    check_folder(workdir)
    return replace(_work(folder, settings, workdir, built), files=_copied(folder / "environment", built, workdir))


def _work(folder: Path, settings: Mapping[str, Any], workdir: str, built: Built) -> Work:
    own = settings.get("environment", {})
    tests = files_in(folder / "tests")
    if TESTS not in tests:
        raise Unsupported(f"tests/{TESTS} is missing")
    tests[TESTS] = File(tests[TESTS].content, True)
    verifier, agent = settings.get("verifier", {}), settings.get("agent", {})
    variables, more = {**built.variables, **_variables("environment", own)}, _variables("verifier", verifier)
    if (size := sum(len(f"{name}={value}".encode()) for name, value in {**variables, **more}.items())) > MOST_VARIABLES:
        raise Unsupported(f"its environment variables have {size:,} bytes; {MOST_VARIABLES:,} are possible")
    setup = "\n".join(["set -e", *built.commands]) if built.commands else ""
    if len(setup.encode()) > LONGEST_COMMAND:
        raise Unsupported(f"Dockerfile: RUN lines with their variables have more than {LONGEST_COMMAND:,} bytes")
    return Work(
        setup=setup,
        tests=tests,
        folder=workdir,
        only_reported=True,
        variables=variables,
        tests_variables=more,
        seconds=_number("agent", agent, "timeout_sec"),
        tests_s=_number("verifier", verifier, "timeout_sec"),
        setup_s=_number("environment", own, "build_timeout_sec"),
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
    text = _text(folder, "task.toml")
    if _DEEP_KEY.search(text):  # whose time grows with the square of the depth
        raise ValueError(f"task.toml: a key of more than {DEEPEST} parts")
    try:
        settings = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"task.toml: {error}") from error
    if _is_deeper(settings, DEEPEST):
        raise ValueError(f"task.toml: tables within tables, more than {DEEPEST}")
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
    ignored = () if environment == "container" else ("environment/.dockerignore",)
    for name in ("trajectory.json", IGNORE, f"tests/{IGNORE}", f"solution/{IGNORE}", *ignored):
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


def _image(folder: Path, own: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of ``Work`` that say which image it needs."""
    place, image = folder / "environment", str(own.get("docker_image") or "")
    _check_link(folder, place)
    asked = [settings.get(name, {}).get("network_mode", "public") for name in ("environment", "agent", "verifier")]
    made: dict[str, Any] = {"network": own.get("allow_internet", True) is True and "no-network" not in asked}
    files = sorted(path for path in place.glob("*compose*") if path.name in COMPOSE)
    if others := [path.name for path in sorted(place.glob("*compose*")) if path not in files[:1]]:
        raise Unsupported(f"environment/{others[0]}")
    if os.path.lexists(place / "Dockerfile") and not image:
        _text(folder, "environment/Dockerfile")
        made["build"] = place
    if image:
        made["docker_image"] = image
    if files:
        variables = {"CONTEXT_DIR": ".", "MAIN_IMAGE_NAME": "", "PREBUILT_IMAGE_NAME": image, "TEST_DIR": "/tests"}
        try:
            compose = read_compose(_text(folder, f"environment/{files[0].name}"), place, variables)
        except Unsupported as error:
            raise Unsupported(f"environment/{files[0].name}: {error}") from error
        except ValueError as error:
            raise ValueError(f"environment/{files[0].name}: {error}") from error
        made |= {"compose": compose, "compose_file": str(files[0])}
        if not (made.keys() & {"build", "docker_image"}) and not compose["services"][MAIN].keys() & {"build", "image"}:
            raise Unsupported(f"environment/{files[0].name}: services.{MAIN} has no image")
    elif not (image or made.get("build")):
        raise Unsupported("environment/Dockerfile is missing")
    return made


def _built(folder: Path, own: Mapping[str, Any], environment: Place) -> Built:
    place = folder / "environment"
    if others := [path.name for path in sorted(place.glob("*compose*"))]:
        raise Unsupported(f"environment/{others[0]}")
    if not os.path.lexists(place / "Dockerfile"):
        if own.get("docker_image"):
            return Built(str(own["docker_image"]))
        raise Unsupported("environment/Dockerfile is missing")
    built = read_dockerfile(_text(folder, "environment/Dockerfile"))
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
    total = 0
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
                found = {name: _file(folder.parent, path)}
            total += sum(len(file.content) for file in found.values())
            if total > MOST_BYTES:
                raise Unsupported(f"Dockerfile: COPY puts more than {MOST_BYTES >> 20} MiB")
            files |= {posixpath.normpath(name): file for name, file in found.items()}
        if inside.count("/") > MOST_PARTS:
            raise Unsupported(f"Dockerfile: COPY into folders within folders, more than {MOST_PARTS}")
    return files


def files_in(folder: Path) -> dict[str, File]:
    """Returns the files below a folder. Raises ``ValueError`` for links, for what is no file, and for too many bytes."""
    _check_link(folder.parent, folder)
    files: dict[str, File] = {}
    total, places = 0, [folder] if folder.is_dir() else []
    for place in places:  # which grows
        for path in sorted(place.iterdir()):
            if path.is_symlink():
                raise Unsupported(f"{path.relative_to(folder.parent)} is a link")
            if len(path.relative_to(folder).parts) > MOST_PARTS:
                raise Unsupported(f"{folder.name} has folders within folders, more than {MOST_PARTS}")
            if path.is_dir():
                places.append(path)
            else:
                file = files[path.relative_to(folder).as_posix()] = _file(folder.parent, path, MOST_BYTES - total)
                total += len(file.content)
            if len(files) + len(places) > MOST_FILES:
                raise Unsupported(f"{folder.name} has more than {MOST_FILES:,} files and folders")
    return dict(sorted(files.items()))


def _check_link(folder: Path, path: Path) -> None:
    """Raises ``ValueError`` if a path below a folder is a link or behind one: a task could have any file of the machine by it."""
    place = folder
    for part in path.relative_to(folder).parts:
        place = place / part
        if place.is_symlink():
            raise Unsupported(f"{place.relative_to(folder)} is a link")


def _file(folder: Path, path: Path, most: int = MOST_BYTES) -> File:
    """Returns a file below a folder. Raises ``ValueError`` for what is none (a pipe would never end) and for a larger one."""
    name = path.relative_to(folder)
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    try:
        about = os.fstat(opened)
        if not stat.S_ISREG(about.st_mode):
            raise Unsupported(f"{name} is no file")
        if about.st_size > most:
            raise Unsupported(f"{name} has {about.st_size:,} bytes; there is room for {most:,}")
        with open(opened, "rb", closefd=False) as file:
            return File(file.read(most), bool(about.st_mode & 0o100))
    finally:
        os.close(opened)


def _text(folder: Path, name: str) -> str:
    _check_link(folder, folder / name)
    try:
        return _file(folder, folder / name, MOST_TEXT).content.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: {error}") from error


def _is_deeper(value: Any, most: int) -> bool:
    level = [value]
    for _ in range(most):
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
    return bool(level)


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


def _number(name: str, section: Mapping[str, Any], key: str, field: str = "") -> float | None:
    value = section.get(key)
    if value is None:
        return None
    least, most = RANGES[field or key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ValueError(f"task.toml: {name}.{key} {str(value)[:40]!r} is no number from {least:g} to {most:g}")
    return float(value)


def _megabytes(section: Mapping[str, Any], name: str) -> int | None:
    """Returns a size from its field in MB, or from the older one with a unit."""
    value = _number("environment", section, f"{name}_mb", name)
    if value is not None or name not in section:
        return None if value is None else int(value)
    text = str(section[name]).strip().upper()
    if not (found := re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)([KMG])", text)):
        raise ValueError(f"task.toml: environment.{name} {str(section[name])[:40]!r}; give a size such as 512M")
    megabytes = float(found[1]) * {"K": 1 / 1024, "M": 1, "G": 1024}[found[2]]
    value = _number("environment", {name: megabytes}, name)
    return None if value is None else int(value)


def in_one_line(error: BaseException) -> str:
    """Returns what is wrong with a task, as a line of visible characters."""
    text = "".join(letter if letter.isprintable() else "\ufffd" for letter in " ".join(str(error).split()))
    return text if len(text) <= MOST_TOLD else f"{text[:MOST_TOLD]} ..."
