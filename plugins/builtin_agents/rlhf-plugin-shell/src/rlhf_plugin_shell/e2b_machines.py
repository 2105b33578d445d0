"""The sandbox ``e2b``: for each episode a machine of E2B, or of another service that its client speaks to."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
import secrets
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from rlhf_host import UserError
from rlhf_plugin_shell.leftovers import is_over, this_process
from rlhf_plugin_shell.machine import Machine
from rlhf_plugin_shell.sandboxes import ShellLimits
from rlhf_plugin_shell.service import KEY, ServiceFailed, tried
from rlhf_plugin_shell.work import Work

log = logging.getLogger(__name__)
WORK = "/work"
"""Working folder of rows."""
OURS = {"rlhf": "shell"}
PROCESS = "rlhf-process"
"""Metadata of a machine, beside ``OURS``: the process whose it is."""
RENEWALS = 3
"""Renewals of a machine's time in which one must succeed."""
ENDS_S = 60.0
"""Seconds in which machines that were being made when a run ended are ended."""


class E2B:
    """Machines of E2B: a template for all tasks, or for each image."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        template: str = Field("base", min_length=1, description="name or id of the template of tasks without an image")
        templates: dict[str, str] = Field(
            default_factory=dict, description="image (column docker_image, or of task.toml) and the template that is made of it"
        )
        user: str = Field(
            "user", min_length=1, description="user of commands. root can end its machine, and so fail its episode"
        )
        network: bool = Field(False, description="tasks that ask for a network have one; if not, no task has")
        life_s: int = Field(
            300, ge=15, le=3600, description="seconds after which the service ends a machine whose run is gone; runs renew them"
        )
        tries: int = Field(
            5, ge=1, le=20, description="calls of the service until one has failed: rate limits, 5xx, lost connections"
        )

    def __init__(self, options: Options, limits: ShellLimits):
        self.options, self.limits = options, limits
        self._starting = asyncio.Lock()
        self._client: Any = None
        self._tried: set[str] = set()
        self._ending: set[asyncio.Task[Any]] = set()
        """Machines that were being made when nobody waited for them any more."""

    def misfit(self, work: Work) -> str:
        if work.compose is not None or work.build is not None:
            what = "a compose file" if work.compose is not None else "a Dockerfile that is built"
            return f"it has {what}: make a template of it, and give docker_image and sandbox_options.templates; or use docker"
        if work.docker_image and work.docker_image not in self.options.templates:
            return f"its image {work.docker_image} has no template: --agent.sandbox_options.templates '{{IMAGE: TEMPLATE}}'"
        return ""

    async def start(self) -> None:
        async with self._starting:
            if self._client is not None:
                return
            if importlib.util.find_spec("e2b") is None:
                raise UserError("shell: the sandbox e2b needs its client: pip install 'rlhf-plugin-shell[e2b]'")
            if not os.environ.get(KEY):
                raise UserError(f"shell: the sandbox e2b needs a key in the environment variable {KEY}")
            if os.environ.get("E2B_DEBUG", "").lower() == "true":
                raise UserError("shell: E2B_DEBUG is set, and its client then ends no sandboxes: unset it")
            from e2b import AsyncSandbox

            try:
                gone = await self._remove_leftovers(AsyncSandbox)
            except ServiceFailed as failure:
                raise UserError(f"shell: {failure}") from None
            if gone:
                log.warning("shell: ended %d machines of runs that were killed", gone)
            self._client = AsyncSandbox

    async def prepare(self, works: Sequence[Work]) -> None:
        await self.start()
        asked: dict[str, list[Work]] = {}
        for work in works:
            asked.setdefault(self._template(work), []).append(work)
        for template, tasks in asked.items():
            if template in self._tried:
                continue
            try:
                wrong = await self._wrong(template, tasks)
            except ServiceFailed as failure:
                wrong = str(failure)
            if wrong:
                raise UserError(f"shell: the template {template} cannot be used: {wrong}")
            self._tried.add(template)
        log.warning(
            "shell: processors, memory and disk of machines are those of their template, not agent.memory_mb and disk_mb"
        )

    async def _wrong(self, template: str, works: Sequence[Work]) -> str:
        """Returns what is wrong with a template for these tasks, or nothing."""
        machine = await self.open(works[0])
        try:
            about = await tried("looking at a machine", machine.box.get_info, self.options.tries)
            for name, has in (("cpus", about.cpu_count), ("memory_mb", about.memory_mb)):
                if has and (most := max(getattr(work, name) or 0 for work in works)) > has:
                    return f"its machines have {name} {has}, and a task needs {most:g}"
            ran = await machine.run("echo ready", 30.0)
            return "" if ran.output == "ready\n" else f"bash does not run in it: {ran.output[-300:].strip() or ran.why}"
        finally:
            await machine.close()

    async def open(self, work: Work) -> Machine:
        await self.start()
        making = asyncio.ensure_future(self._made(work))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            ending = asyncio.ensure_future(_ended(making))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
            raise

    async def close(self) -> None:
        if self._ending:
            await asyncio.wait(self._ending, timeout=ENDS_S)
        self._client = None

    def _template(self, work: Work) -> str:
        return self.options.templates[work.docker_image] if work.docker_image else self.options.template

    async def _made(self, work: Work) -> Machine:
        own = self.options
        key = secrets.token_hex(16)  # of one machine, however often it is asked for
        box = await tried(
            "making a machine",
            lambda: self._client.create(
                template=self._template(work),
                timeout=own.life_s,
                metadata={**OURS, PROCESS: this_process()},
                allow_internet_access=own.network and work.network,
                lifecycle={"on_timeout": "kill"},
                idempotency_key=key,
            ),
            own.tries,
        )
        renewing = asyncio.ensure_future(self._renewed(box))

        async def end() -> None:
            renewing.cancel()
            try:
                await tried("ending a machine", box.kill, own.tries)
            except ServiceFailed as failure:
                log.warning("shell: %s; the service ends %s in %d s", failure, box.sandbox_id, own.life_s)

        plain = not work.only_reported
        folder = work.folder or (WORK if plain else "")
        home = folder if plain else ""
        machine = Machine(box, self.limits, own.user, folder, home=home, clean=plain, tries=own.tries, end=end)
        try:
            await machine.begin()
        except BaseException:
            await machine.close()
            raise
        return machine

    async def _renewed(self, box: Any) -> None:
        """Keeps a machine from its end, as long as this process lives."""
        while True:
            await asyncio.sleep(self.options.life_s / RENEWALS)
            with contextlib.suppress(ServiceFailed):  # the next call says it
                await tried("renewing a machine", lambda: box.set_timeout(self.options.life_s), 1)

    async def _remove_leftovers(self, client: Any) -> int:
        """Ends machines of processes of this machine that are gone. Raises ``ServiceFailed``."""
        from e2b import SandboxQuery

        async def end(id: str) -> bool:
            return bool(await tried("ending a machine", lambda: client.kill(id), self.options.tries))

        pages, ours = client.list(query=SandboxQuery(metadata=OURS)), list[Any]()
        while pages.has_next:  # to the end, before any is ended: pages may shift then
            ours += await tried("listing machines", pages.next_items, self.options.tries)
        gone = [each for each in ours if is_over((each.metadata or {}).get(PROCESS, ""))]
        return sum([await end(each.sandbox_id) for each in gone])


async def _ended(making: asyncio.Future[Machine]) -> None:
    with contextlib.suppress(ServiceFailed):
        await (await making).close()
