"""The sandbox ``contained``: a shell with this machine's programs, contained by system calls of Linux."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field
from rlhf_plugin_code_exec.containment import Level, shell_level
from rlhf_plugin_code_exec.interpreters import reachable_python
from rlhf_plugin_code_exec.shells import Shell, ShellLimits, home, limits_within

from rlhf_host import EpisodeFailed
from rlhf_plugin_shell.sandboxes import SandboxFailed
from rlhf_plugin_shell.work import Work


class Contained:
    """Shells that are contained by system calls."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        trust: bool = Field(False, description="run commands uncontained where this machine cannot contain them")
        python: str | None = Field(None, description="interpreter that commands may read, with its packages")

    def __init__(self, options: Options, limits: ShellLimits):
        self.trust = options.trust
        self.python = options.python or reachable_python()
        self.limits = limits
        self._level: Level | None = None

    def misfit(self, work: Work) -> str:
        if not work.image_needed:
            return ""
        what = work.docker_image or ("a compose file" if work.compose else "a Dockerfile that is built")
        return f"it needs a container ({what}): --agent.sandbox docker or podman"

    async def start(self) -> None:
        await self.level()

    async def level(self) -> Level:
        """Returns the level at which commands are contained. Raises ``UserError`` if this machine has none."""
        self._level = self._level or await shell_level("shell", self.python, trust=self.trust)
        return self._level

    async def prepare(self, works: Sequence[Work]) -> None:
        """There is nothing to prepare."""

    async def open(self, work: Work) -> Shell:
        level = await self.level()
        own = level == "A"
        if work.folder and not own:
            raise EpisodeFailed(
                f"the task's scripts need the paths {work.folder}, /tests and /logs, and this machine allows no file system of its"
                " own to a shell (user namespaces)"
            )
        try:
            folder = work.folder or await asyncio.to_thread(home, self.python)
        except OSError as error:
            raise SandboxFailed(str(error)) from error
        shell = Shell(self.python, limits_of(work, self.limits), level, folder if own else "")
        try:
            await shell.open()
        except BaseException:
            await shell.close()
            raise
        return shell

    async def close(self) -> None:
        """Each shell is closed by its episode."""


def limits_of(work: Work, limits: ShellLimits) -> ShellLimits:
    """Returns the limits of a task within those of the run."""
    cpus = None if work.cpus is None else math.ceil(work.cpus)
    return limits_within(limits, memory=_bytes(work.memory_mb), disk=_bytes(work.disk_mb), cpus=cpus)


def _bytes(megabytes: int | None) -> int | None:
    return None if megabytes is None else megabytes << 20
