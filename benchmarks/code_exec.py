"""Code execution: attacks by level and time, 500 hostile programs in a row and what they leave, honest programs per second.

python benchmarks/code_exec.py
"""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import time

from rlhf_plugin_code_exec import CodeExec, attacks, checks
from rlhf_plugin_code_exec.suites import suite_of

HONEST = suite_of("", "\n".join(f"assert add({n}, 1) == {n + 1}" for n in range(20)))
HARMFUL = ("forks without end", "fills memory", "leaves a daemon", "ends itself early", "fills the disk", "says that it passed")


def left() -> str:
    processes = subprocess.run(["ps", "-eo", "uid"], capture_output=True, text=True, check=True).stdout.split()
    contained = sum(one.isdigit() and 61000 <= int(one) < 65000 for one in processes)
    folders = sum(name.startswith("rlhf-code-") for name in os.listdir("/tmp"))
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return f"{contained} processes, {folders} folders, {resident:.0f} MiB resident"


async def main() -> None:
    agent = CodeExec(CodeExec.Options(timeout_s=2.0, cpus=os.cpu_count() or 1))
    print("level of this machine:", await agent.check())
    for level in ("A", "B"):
        agent.runner.level = level  # type: ignore[assignment]
        with checks.outside() as place:
            before = place.state()
            tries = attacks.trying(place.filled(attacks.TRIES | attacks.QUIET))
            programs = {f"{attacks.COUNT - len(attacks.ATTACKS)} tries in one": tries, **place.filled(attacks.ATTACKS)}
            for name, code in programs.items():
                _, seconds, out = await checks.attempt(agent.runner, name, code)
                print(f"{level}  {name:50} {seconds:5.2f} s  {'GOT OUT' if out else 'contained'}")
            print(f"{level}  changed outside: {[each for each in place.state() if each not in before] or 'nothing'}")
    for level in ("A", "B"):
        agent.runner.level = level  # type: ignore[assignment]
        with checks.outside() as place:
            harmful = list(place.filled({name: attacks.ATTACKS[name] for name in HARMFUL}).values())
            before_it, started = left(), time.monotonic()
            for number in range(500):
                await agent.runner.tests(harmful[number % len(harmful)], checks.WANTED)
            print(
                f"{level}  500 hostile programs in a row: {time.monotonic() - started:.1f} s; before: {before_it}; after: {left()}"
            )
        print(f"{level}  honest programs: {await rate(agent)}")


async def rate(agent: CodeExec) -> str:
    """Honest programs per second and core: by the clock, and by the processor time that they took."""
    started, used = time.monotonic(), spent()
    await asyncio.gather(*(agent.runner.tests("def add(a, b): return a + b", HONEST) for _ in range(200)))
    by_clock = 200 / (time.monotonic() - started) / (os.cpu_count() or 1)
    return f"{by_clock:.1f} per second and core, {200 / (spent() - used):.1f} per second of processor time"


def spent() -> float:
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


if __name__ == "__main__":
    asyncio.run(main())
