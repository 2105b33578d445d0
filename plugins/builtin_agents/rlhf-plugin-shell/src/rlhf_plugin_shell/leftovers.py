"""Whose a container is, by its labels; and the removal of those whose run is over, however it ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import subprocess
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from rlhf_plugin_shell.docker_command import DockerCommand, passed_on
from rlhf_plugin_shell.sandboxes import SandboxFailed

OWNER, PROCESS = "rlhf.shell.owner", "rlhf.shell.process"
"""Labels: the owner of a container, and its process."""
KINDS = {
    "container": (("ps", "--all", "--quiet"), ("rm", "--force", "--volumes"), ("inspect", "--format")),
    "network": (("network", "ls", "--quiet"), ("network", "rm"), ("network", "inspect", "--format")),
    "volume": (("volume", "ls", "--quiet"), ("volume", "rm", "--force"), ("volume", "inspect", "--format")),
}
"""Kind of leftover → how it is listed, removed and looked at."""
_GUARD = """
trap '' INT TERM HUP
passes="1 2 3"
read -r _ && passes=3
for pass in $passes; do
  for kind in "ps --all|rm --force --volumes" "network ls|network rm" "volume ls|volume rm --force"; do
    left=$("$0" ${kind%%|*} --quiet --filter "label=$1")
    [ -z "$left" ] || "$0" ${kind#*|} $left
  done
  [ "$pass" = 3 ] || sleep 1
done
"""
"""Waits for a line, or until its standard input is closed because the run is gone, then removes what has the label. Without a
line it looks three times: a container may be about to be made when the run is killed."""


class Owner:
    """The owner of containers: what it has made is removed by ``close``, or when this process is gone."""

    def __init__(self, docker: DockerCommand):
        self.docker = docker
        self.name = secrets.token_hex(8)
        self.labels: Mapping[str, str] = {
            OWNER: self.name,
            PROCESS: this_process(),
        }
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, docker.path, f"{OWNER}={self.name}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=passed_on(),
            start_new_session=True,
        )

    async def remove_leftovers(self) -> int:
        """Removes what killed processes of this machine left, and returns how many things that were. Raises ``CallFailed``."""
        gone = 0
        for listed, removed, seen in KINDS.values():
            places = '{{index .Labels "%s"}}' if listed[0] != "ps" else '{{index .Config.Labels "%s"}}'
            for each in (await self.docker.call(*listed, "--filter", f"label={OWNER}")).split():
                try:
                    process = await self.docker.call(*seen, places % PROCESS, each)
                    if is_over(process):
                        await self.docker.call(*removed, each)
                        gone += 1
                except SandboxFailed:
                    continue  # another run removes it, too, or still uses the network
        return gone

    async def close(self) -> None:
        """Removes everything that has the owner's name."""
        if self._guard.stdin is not None:
            with contextlib.suppress(OSError):
                self._guard.stdin.write(b"\n")
                self._guard.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._guard.wait, 60)


@lru_cache
def this_process() -> str:
    """Returns a name of this process that no other process has, also of another machine or after a restart."""
    return f"{_here()}/{os.getpid()}/{_begun(os.getpid())}"


def is_over(process: str) -> bool:
    """Returns True if a process of this machine is gone. Nothing is known of others."""
    here, _, rest = process.rpartition("/")[0].rpartition("/")
    if here != _here() or not rest.isdigit():
        return False
    return _begun(int(rest)) != process.rpartition("/")[2]


@lru_cache
def _here() -> str:
    """This start of this machine, and the space of its process numbers."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:  # not Linux: leftovers of killed runs are not found
        return secrets.token_hex(8)


def _begun(pid: int) -> str:
    """Returns when a process began, in the kernel's clock; empty if there is none."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state[0] in "ZX" else state[19]
