"""Files, scripts and limits of an episode, from columns of a row or from a directory."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from rlhf_plugin_code_exec.shells import LONGEST_COMMAND, File

from rlhf_host import Task

COLUMNS = ("files", "setup", "tests", "docker_image")
DIRECTORY = "harbor"
"""The column of tasks in directories."""
TESTS = "test.sh"
MOST_PARTS = 48
"""Most parts of the path of a file: a shell has no deeper folders."""


@dataclass(frozen=True, slots=True)
class Work:
    """Files and scripts of an episode, with their limits."""

    files: Mapping[str, File] = field(default_factory=dict)
    """Path below the working folder → file."""
    setup: str = ""
    tests: Mapping[str, File] = field(default_factory=dict)
    """Files of tests; ``test.sh`` is run. Commands of the policy never see them."""
    folder: str = ""
    """Path of the working folder, for scripts that need it, ``/tests`` and ``/logs``; empty: any."""
    only_reported: bool = False
    """True if the reward is what tests write; else, without a report, their exit code decides."""
    variables: Mapping[str, str] = field(default_factory=dict)
    tests_variables: Mapping[str, str] = field(default_factory=dict)
    seconds: float | None = None
    """Seconds for all of the policy's work."""
    tests_s: float | None = None
    setup_s: float | None = None
    cpus: float | None = None
    memory_mb: int | None = None
    disk_mb: int | None = None
    docker_image: str = ""
    build: Path | None = None
    """Folder with a Dockerfile, of which the image is built."""
    compose: Mapping[str, Any] | None = None
    """Services beside the one in which commands run, as ``read_compose`` returns them."""
    compose_file: str = ""
    network: bool = False
    """True if the task asks for a network."""

    @property
    def environment(self) -> str:
        """Source of the image: tasks with the same one have the same image."""
        return self.compose_file or str(self.build or "") or self.docker_image

    @property
    def image_needed(self) -> bool:
        """True if only a container can be its place."""
        return bool(self.docker_image or self.build or self.compose is not None)


def work_of(task: Task) -> Work:
    """Returns the work of a task. Raises ``ValueError`` for one that cannot be read, with the reason."""
    metadata = task.metadata
    if DIRECTORY in metadata:
        if also := [name for name in COLUMNS if metadata.get(name) is not None]:
            raise ValueError(f"a task in a directory has its own {also[0]}")
        from rlhf_plugin_shell.directory import read_directory

        return read_directory(metadata[DIRECTORY])
    setup, tests, image = (metadata.get(name) or "" for name in COLUMNS[1:])
    for name, text in zip(COLUMNS[1:], (setup, tests, image), strict=True):
        if not isinstance(text, str):
            what = "an image" if name == "docker_image" else "a command or a script"
            raise ValueError(f"{name} is a {type(text).__name__}; give {what}, as a text")
        if "\0" in text:
            raise ValueError(f"{name} has a zero byte, which no script may have")
    if len(setup.encode()) > LONGEST_COMMAND:
        raise ValueError(f"setup has more than {LONGEST_COMMAND} bytes: put it into a file, and run that")
    scripts = {TESTS: File(tests.encode(), True)} if tests.strip() else {}
    return Work(_files(metadata.get("files")), setup, scripts, docker_image=image)


def _files(given: Any) -> dict[str, File]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ValueError(f'files is a {type(given).__name__}; give an object: {{"NAME": "TEXT"}}')
    files = {name: File(_content(name, value)) for name, value in given.items() if value is not None}
    for name in files:
        if folder := next((above for above in map(str, PurePosixPath(name).parents) if above in files), None):
            raise ValueError(f"files: {folder!r} is a file, and the folder of {name!r}")
    return files


def _content(name: Any, value: Any) -> bytes:
    parts = name.split("/") if isinstance(name, str) and "\0" not in name else [""]
    if len(parts) > MOST_PARTS or any(part in ("", ".", "..") or len(part.encode()) > 255 for part in parts):
        raise ValueError(f"files: {name!r} is no path below the working folder, such as src/main.py")
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes):
        return value
    if isinstance(value, Mapping) and set(value) == {"base64"}:
        try:
            return base64.b64decode(value["base64"], validate=True)
        except (binascii.Error, TypeError) as error:
            raise ValueError(f"files: {name}: {error}") from error
    raise ValueError(f'files: {name} is a {type(value).__name__}; give a text, or {{"base64": ...}}')
