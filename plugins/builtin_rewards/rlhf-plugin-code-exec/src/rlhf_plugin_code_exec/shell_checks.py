"""Tries attacks in a shell on this machine: it has other rules than single programs."""

from __future__ import annotations

from rlhf_plugin_code_exec.attacks import QUIET, TRIES, trying
from rlhf_plugin_code_exec.checks import outside
from rlhf_plugin_code_exec.runner import Level
from rlhf_plugin_code_exec.shells import File, Shell, ShellLimits

LIMITS = ShellLimits(memory=512 << 20, processes=24, file=8 << 20, files=60, disk=24 << 20, output=1 << 20)
HAS = {
    *("reads the tests", "writes its own code", "writes into /tmp", "lists the folders of programs", "changes its owner"),
    *("makes a larger pipe", "writes its input"),
}
"""Tries that a shell may do, because they reach its own folder only."""
HAS_OWN = {"opens a raw UNIX socket", "shares memory in /dev/shm"}
"""The same, in a file system of its own."""
CODE = """
{code}
print(f(), flush=True)
os._exit(1)
"""
FORKS = """
import os, time
count = 0
try:
    for _ in range(300):
        if os.fork() == 0: time.sleep(60)
        count += 1
except OSError: pass
print(count)
"""
DISK = "for i in 1 2 3 4 5 6; do head -c 8000000 /dev/zero > f$i; done; sleep 5"


async def shell_escapes(python: str, level: Level, work: str = "") -> list[str]:
    """Returns the attacks that got something, or were not stopped. Raises ``JailFailed``."""
    escaped = []
    with outside() as place:
        before = place.state()
        may = HAS | (HAS_OWN if work else set())
        tries, quiet = place.filled({name: each for name, each in TRIES.items() if name not in may}), place.filled(QUIET)
        shell = Shell(python, LIMITS, level, work)
        try:
            await shell.open()
            files = {"tries.py": trying(tries), "quiet.py": trying(quiet)}
            plain = {name: File(CODE.format(code=code).encode()) for name, code in files.items()}
            await shell.put({**plain, "forks.py": File(FORKS.encode())})
            told = await shell.run(f"{python} tries.py", 30)
            if told.why != "ended" or set(told.output.split()) != {
                "None"
            }:  # a child that is refused goes on as its parent does
                escaped.append(f"in a shell: {told.why}: {told.output.strip()}")
            await shell.run(f"{python} quiet.py", 30)
            forked = await shell.run(f"{python} forks.py", 30)
            if forked.why == "ended" and not 0 < int(forked.output or 0) <= LIMITS.processes:
                escaped.append(f"in a shell: forks {forked.output.strip()} times")
            if (await shell.run(DISK, 5)).why != "disk":
                escaped.append("in a shell: fills the disk")
        finally:
            await shell.close()
        return escaped + [f"a change outside: {each}" for each in place.state() if each not in before]
