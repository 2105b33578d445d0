"""Images of tasks: pulled or built once, before they are needed."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_plugin_shell.docker_command import CallFailed, DockerCommand

LABEL = "rlhf.shell.image"
"""Label of images that were built: ``docker image prune --all --filter label=rlhf.shell.image`` removes them."""


@dataclass(frozen=True)
class Build:
    """An image that is built from a folder."""

    context: Path
    file: Path
    arguments: Mapping[str, str] = field(default_factory=dict)
    target: str = ""

    @property
    def tag(self) -> str:
        """The image's name, which changes with all that it is built from. Raises ``OSError``."""
        file = os.path.relpath(self.file, self.context)
        known = hashlib.sha256(f"{file}\0{sorted(self.arguments.items())}\0{self.target}\0".encode())
        known.update(self.file.read_bytes())
        for top, folders, files in os.walk(self.context):
            folders.sort()
            for name in sorted([*files, *folders]):
                path = Path(top, name)
                about = path.lstat()
                known.update(f"\0{path.relative_to(self.context)}\0{about.st_mode}\0".encode("utf-8", "surrogateescape"))
                if stat.S_ISLNK(about.st_mode):
                    known.update(os.fsencode(os.readlink(path)))
                elif stat.S_ISREG(about.st_mode):
                    with open(path, "rb") as opened:
                        known.update(hashlib.file_digest(opened, "sha256").digest())
        return f"rlhf-shell:{known.hexdigest()[:32]}"


class Images:
    """Images that are there, or are made to be."""

    def __init__(self, docker: DockerCommand, seconds: float):
        self.docker, self.seconds = docker, seconds
        self._there: dict[str, asyncio.Lock | None] = {}
        self._tags: dict[str, str] = {}
        self._configs: dict[str, dict[str, Any]] = {}

    async def had(self, what: Build | str, seconds: float | None = None) -> str:
        """Returns the name of an image that is there now. Raises ``CallFailed`` if it cannot be had, and ``OSError``."""
        name = await self._tag(what) if isinstance(what, Build) else what
        lock = self._there.setdefault(name, asyncio.Lock())
        if lock is None:
            return name
        async with lock:
            if self._there[name] is not None and not await self._is_there(name):
                within = min(self.seconds, seconds or self.seconds)
                if isinstance(what, Build):
                    more = [word for key, value in what.arguments.items() for word in ("--build-arg", f"{key}={value}")]
                    more += ["--target", what.target] if what.target else []
                    given = ("--quiet", "--tag", name, "--label", f"{LABEL}=1", "--file", str(what.file), *more)
                    await self.docker.call("build", *given, str(what.context), seconds=within)
                else:
                    await self.docker.call("pull", "--quiet", name, seconds=within)
            self._there[name] = None
        return name

    async def _tag(self, build: Build) -> str:
        key = repr(build)
        if key not in self._tags:
            self._tags[key] = await asyncio.to_thread(lambda: build.tag)
        return self._tags[key]

    async def config(self, name: str) -> dict[str, Any]:
        """Returns the settings of an image that is there. Raises ``CallFailed``."""
        if name not in self._configs:
            told = await self.docker.call("image", "inspect", "--format", "{{json .Config}}", name)
            self._configs[name] = json.loads(told) or {}
        return self._configs[name]

    async def _is_there(self, name: str) -> bool:
        try:
            await self.docker.call("image", "inspect", "--format", "{{.Id}}", name)
        except CallFailed:
            return False
        return True
