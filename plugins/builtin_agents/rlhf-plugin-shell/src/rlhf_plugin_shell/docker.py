"""The sandboxes ``docker`` and ``podman``: a container for each episode, by the command of that name."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from rlhf_host import UserError
from rlhf_plugin_shell import compose
from rlhf_plugin_shell.contained import limits_of
from rlhf_plugin_shell.container import STAYS, Container, Paths
from rlhf_plugin_shell.docker_command import CallFailed, DockerCommand, docker_command
from rlhf_plugin_shell.images import Build, Images
from rlhf_plugin_shell.leftovers import OWNER, Owner
from rlhf_plugin_shell.sandboxes import SandboxFailed, ShellLimits
from rlhf_plugin_shell.work import Work

log = logging.getLogger(__name__)
WORK = "/work"
"""Working folder of rows, in images without one."""
THREADS = 64
"""Threads and processes that a container may have beyond ``processes``."""
CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "NET_BIND_SERVICE", "SETGID", "SETUID", "SYS_CHROOT")
"""Capabilities of a container's root: package managers and servers need them."""
ROOT = ("", "0", "root", "0:0", "root:root")
READY_S = 120
"""Seconds in which the services of a compose file must be healthy."""
TRIED_S = 30.0
AT_ONCE = 4
"""Images that are made ready at the same time."""
MOST_NAMED = 5
IMAGE = re.compile(r"[\w][\w./:@-]{0,400}", re.ASCII)


class Docker:
    """Containers of Docker: an image, a Dockerfile or a compose file for each task."""

    NAME = "docker"

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        image: str = Field("", description="image of rows without a column docker_image")
        network: bool = Field(False, description="tasks that ask for a network have one; if not, no task has")
        user: str = Field("", description="user of commands; default: the image's")
        build_timeout_s: float = Field(1800.0, gt=0, description="deadline for building or pulling an image, in seconds")
        command: str = Field("", description="name or path of the command, for another that understands the same command line")

    def __init__(self, options: Options, limits: ShellLimits):
        self.options, self.limits = options, limits
        self._starting = asyncio.Lock()
        self._begun: tuple[DockerCommand, Owner, Images] | None = None
        self._made = 0
        self._scratch: Path | None = None
        self._ready: set[str] = set()

    def misfit(self, work: Work) -> str:
        if work.image_needed:
            names = [work.docker_image]
        elif work.folder:
            return f"its Dockerfile was read for a shell without images: --data.harbor.environment container, with {self.NAME}"
        elif not self.options.image:
            return "it names no image: a column docker_image, or --agent.sandbox_options.image for all rows"
        else:
            names = [self.options.image]
        wrong = next((name for name in names if name and not IMAGE.fullmatch(name)), "")
        return f"{wrong!r} is no name of an image" if wrong else ""

    async def start(self) -> None:
        await self._started()

    async def _started(self) -> tuple[DockerCommand, Owner, Images]:
        async with self._starting:
            if self._begun is None:
                name = self.options.command or self.NAME
                docker = docker_command(name)
                if docker is None:
                    raise UserError(f"shell: there is no command {name} here: install it, or --agent.sandbox contained")
                try:
                    await docker.call("ps", "--quiet", "--filter", f"label={OWNER}", seconds=20.0)
                except CallFailed as failure:
                    raise UserError(f"shell: {name} cannot be used by this user here: {failure}") from failure
                owner = Owner(docker)
                try:
                    gone = await owner.remove_leftovers()
                except SandboxFailed as failure:
                    await owner.close()
                    raise UserError(f"shell: {failure}") from failure
                if gone:
                    log.warning("shell: removed %d containers, networks and volumes of runs that were killed", gone)
                self._begun = docker, owner, Images(docker, self.options.build_timeout_s)
            return self._begun

    async def prepare(self, works: Sequence[Work]) -> None:
        await self._started()
        limit = asyncio.Semaphore(AT_ONCE)
        distinct = {work.environment: work for work in works}
        todo = {key: work for key, work in distinct.items() if key not in self._ready}

        async def ready(work: Work) -> str:
            async with limit:
                try:
                    return await self._tried(work)
                except (SandboxFailed, ValueError, OSError) as failure:
                    return str(failure)

        told = await asyncio.gather(*map(ready, todo.values()))
        wrong = [
            f"{work.environment or self.options.image}: {problem}"
            for work, problem in zip(todo.values(), told, strict=True)
            if problem
        ]
        if wrong:
            named = "; ".join(dict.fromkeys(wrong[:MOST_NAMED]))
            raise UserError(f"shell: {len(wrong)} of {len(todo)} images of the tasks cannot be used: {named}")
        self._ready |= set(todo)
        if todo:
            log.warning("shell: tried %d images with %s", len(todo), self.NAME)

    async def _tried(self, work: Work) -> str:
        """Returns what is wrong with a sandbox for this task, or nothing."""
        box = await self.open(work)
        try:
            ran = await box.run("echo ready", TRIED_S)
            if ran.output != "ready\n":
                return f"bash does not run in it: {ran.output[-300:].strip() or ran.why}"
            return ""
        finally:
            await box.close()

    async def open(self, work: Work) -> Container:
        docker, owner, images = await self._started()
        limits = limits_of(work, self.limits)
        network = self.options.network and work.network
        if work.compose is not None:
            id, image, folder, remove = await self._composed(docker, owner, images, work, limits, network)
        else:
            image, folder = await images.had(self._build(work) or work.docker_image or self.options.image, work.setup_s), ""
            id, remove = await self._run(docker, owner, image, work, limits, network)
        try:
            config = await images.config(image)
            place = work.folder or folder or str(config.get("WorkingDir") or "")
            if not work.only_reported and place in ("", "/"):
                place = WORK
            user = self.options.user or str(config.get("User") or "")
            home = "" if work.only_reported else place
            paths = Paths(place or "/", home, "" if user in ROOT else user, clean=not work.only_reported)
            box = Container(docker, id, paths, limits, remove)
            if box.paths.user and not work.only_reported:
                await box.put({})  # a folder that this user may write to
            return box
        except BaseException:
            await asyncio.shield(asyncio.ensure_future(remove()))
            raise

    async def close(self) -> None:
        begun, self._begun = self._begun, None
        scratch, self._scratch = self._scratch, None
        if begun is not None:
            await begun[1].close()
        if scratch is not None:
            await asyncio.to_thread(shutil.rmtree, scratch, True)

    async def _run(
        self, docker: DockerCommand, owner: Owner, image: str, work: Work, limits: ShellLimits, network: bool
    ) -> tuple[str, Callable[[], Awaitable[None]]]:
        labels = [word for name, value in owner.labels.items() for word in ("--label", f"{name}={value}")]
        given = ["--network", "bridge" if network else "none", *labels, *flags_of(self._fields(work, limits))]
        first = ["--entrypoint", "bash", image, "-c", STAYS]
        id = (await docker.call("run", "--detach", "--pull", "never", *given, *first)).split()[-1:]
        if not id:
            raise SandboxFailed(f"{self.NAME} run named no container")

        async def remove() -> None:
            await docker.call("rm", "--force", "--volumes", id[0])

        return id[0], remove

    async def _composed(
        self, docker: DockerCommand, owner: Owner, images: Images, work: Work, limits: ShellLimits, network: bool
    ) -> tuple[str, str, str, Callable[[], Awaitable[None]]]:
        assert work.compose is not None
        names: dict[str, str] = {}
        for name, own in work.compose["services"].items():
            build = own.get("build")
            if name == compose.MAIN and not own.get("image") and build is None:
                what: Build | str = self._build(work) or work.docker_image
            elif build is not None:
                what = Build(build["context"], build["file"], dict(build["args"] or {}), build["target"] or "")
            else:
                what = str(own["image"])
            names[name] = await images.had(what, work.setup_s)
        self._made += 1
        self._scratch = self._scratch or Path(await asyncio.to_thread(tempfile.mkdtemp, "", "rlhf-compose-"))
        project, file = f"rlhf-{owner.name}-{self._made}", self._scratch / f"{self._made}.json"
        made = compose.prepared(work.compose, names, self._fields(work, limits), owner.labels, ("bash", "-c", STAYS), network)
        await asyncio.to_thread(file.write_text, json.dumps(compose.escaped(made)))
        call = ("compose", "--project-name", project, "--project-directory", str(self._scratch), "--file", str(file))

        async def remove() -> None:
            await docker.call(*call, "down", "--volumes", "--remove-orphans", "--timeout", "0")
            file.unlink(missing_ok=True)

        try:
            up = ("up", "--detach", "--no-build", "--pull", "never", "--wait", "--wait-timeout", str(READY_S))
            await docker.call(*call, *up, seconds=READY_S + 60.0)
            id = (await docker.call(*call, "ps", "--quiet", compose.MAIN)).split()
            if len(id) != 1:
                raise SandboxFailed(f"the service {compose.MAIN} has {len(id)} containers")
        except BaseException:
            await asyncio.shield(asyncio.ensure_future(remove()))
            raise
        folder = str(work.compose["services"][compose.MAIN].get("working_dir") or "")
        return id[0], names[compose.MAIN], folder, remove

    def _fields(self, work: Work, limits: ShellLimits) -> dict[str, Any]:
        """Returns the limits of a container, as a compose file has them."""
        fields: dict[str, Any] = {
            "mem_limit": f"{limits.memory}b",
            "memswap_limit": f"{limits.memory}b",
            "pids_limit": limits.processes + THREADS,
            "ulimits": {"cpu": limits.cpu_s, "fsize": limits.file, "core": 0},
            "cap_drop": ["ALL"],
            "cap_add": list(CAPABILITIES),
            "security_opt": ["no-new-privileges"],
        }
        if work.cpus is not None:
            fields["cpus"] = min(work.cpus, os.cpu_count() or 1)
        return fields

    def _build(self, work: Work) -> Build | None:
        return None if work.build is None else Build(work.build, work.build / "Dockerfile")


class Podman(Docker):
    """Containers of Podman."""

    NAME = "podman"


def flags_of(fields: Mapping[str, Any]) -> list[str]:
    """Returns fields of a compose file's service as flags of ``docker run``."""
    flags: list[str] = []
    for name, value in fields.items():
        texts = [f"{key}={each}" for key, each in value.items()] if isinstance(value, dict) else value
        for each in texts if isinstance(texts, list) else [texts]:
            flags += [FLAGS[name], str(each)]
    return flags


FLAGS = {
    "mem_limit": "--memory",
    "memswap_limit": "--memory-swap",
    "pids_limit": "--pids-limit",
    "ulimits": "--ulimit",
    "cap_drop": "--cap-drop",
    "cap_add": "--cap-add",
    "security_opt": "--security-opt",
    "cpus": "--cpus",
}
"""Field of a service → flag of ``docker run``."""
