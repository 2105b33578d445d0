"""Code execution: attacks by level and time, 500 hostile programs in a row and what they leave, honest programs per second.

python benchmarks/code_exec.py
"""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import time

from rlhf_plugin_code_exec import CodeExec, attacks
from rlhf_plugin_code_exec.tasks import Calls

HONEST = Calls("", "\n".join(f"assert add({n}, 1) == {n + 1}" for n in range(20)), ["add"])
PLACES = {"{place!r}": "'/var/written'", "{port}": "9", "{daemon!r}": "'/var/daemon'"}
HARMFUL = ("forks without end", "fills memory", "leaves a daemon", "ends itself early", "fills the disk", "says that it passed")


def left() -> str:
    processes = subprocess.run(["ps", "-eo", "uid"], capture_output=True, text=True, check=True).stdout.split()
    contained = sum(one.isdigit() and 61000 <= int(one) < 65000 + 61000 and int(one) != 65534 for one in processes)
    folders = sum(name.startswith("rlhf-code-") for name in os.listdir("/tmp"))
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return f"{contained} processes, {folders} folders, {resident:.0f} MiB resident"


async def main() -> None:
    agent = CodeExec(CodeExec.Options(timeout_s=2.0, cpus=os.cpu_count() or 1))
    print("level of this machine:", await agent.check())
    with attacks._decoy() as decoy:
        places = {**PLACES, "{pid}": str(decoy.pid)}
        for level in ("A", "B"):
            agent.runner.level = level  # type: ignore[assignment]
            for name, code in attacks.ATTACKS.items():
                _, seconds, out = await attacks.attempt(agent.runner, name, attacks._filled(code, places))
                print(f"{level}  {name:36} {seconds:5.2f} s  {'GOT OUT' if out else 'contained'}")
    for level in ("A", "B"):
        agent.runner.level = level  # type: ignore[assignment]
        before, started = left(), time.monotonic()
        for number in range(500):
            code = attacks._filled(attacks.ATTACKS[HARMFUL[number % len(HARMFUL)]], {**PLACES, "{pid}": "1"})
            await agent.runner.tests(code, Calls("", "f()", ["f"]))
        print(f"{level}  500 hostile programs in a row: {time.monotonic() - started:.1f} s; before: {before}; after: {left()}")
        started = time.monotonic()
        await asyncio.gather(*(agent.runner.tests("def add(a, b): return a + b", HONEST) for _ in range(200)))
        rate = 200 / (time.monotonic() - started)
        cores = os.cpu_count() or 1
        print(f"{level}  honest programs: {rate:.0f} per second on {cores} cores, {rate / cores:.0f} per core")


if __name__ == "__main__":
    asyncio.run(main())
