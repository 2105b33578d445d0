"""Tries ordinary tools in a shell of this machine, and names those that fail or are not installed.

    python -m rlhf_plugin_shell.tools [--python PYTHON]

The exit code is 1 if one fails.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import dataclass
from typing import Literal

from rlhf_plugin_code_exec.shells import Level

from rlhf_host import EpisodeFailed, UserError
from rlhf_plugin_shell.agent import ShellAgent
from rlhf_plugin_shell.contained import Contained
from rlhf_plugin_shell.sandboxes import Sandbox, SandboxFailed
from rlhf_plugin_shell.work import Work

DEADLINE_S = 60.0
Outcome = Literal["works", "not installed", "needs a file system of its own"]


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool, and a command whose output it shows that it works."""

    name: str
    command: str
    tells: str
    """The last line of the output."""
    own: bool = False
    """True if it needs level A."""


def _pool(start: str) -> str:
    lines = (
        *("import multiprocessing as m", "def f(x): return x * x", "if __name__ == '__main__':"),
        f" with m.get_context('{start}').Pool(2) as p: print(sum(p.map(f, range(5))))",
    )
    return "printf '%s\\n' " + " ".join(f'"{line}"' for line in lines) + f" > {start}.py; python {start}.py"


C = "printf 'int printf(const char*, ...); int main(){printf(\"C\\\\n\");}' > x.c; "
WORKER = (
    'const w = require("worker_threads"); w.isMainThread ? new w.Worker(__filename).on("message", console.log)'
    " : w.parentPort.postMessage(6 * 7)"
)
SHARED = (
    "from multiprocessing import shared_memory as s; a = s.SharedMemory(create=True, size=9); a.unlink(); print(len(a.buf))"
)
TOOLS = (
    Tool("make", "printf 'all: a b\\na:\\n\\techo A > a\\nb: a\\n\\tcat a > b\\n' > Makefile; make -j2 && cat b", "A"),
    Tool("gcc", f"{C} gcc x.c -o x && ./x", "C"),
    Tool("g++", "printf '#include <iostream>\\nint main(){std::cout << 5;}' > x.cc; g++ x.cc -o y && ./y", "5"),
    Tool(
        "cmake",
        f"mkdir c; cd c; {C} printf 'project(p C)\\nadd_executable(x x.c)' > CMakeLists.txt; cmake . && make && ./x",
        "C",
    ),
    Tool("ninja", "printf 'rule t\\n command = touch $out\\nbuild made: t\\n' > build.ninja; ninja && ls made", "made"),
    Tool("node", "node -e 'console.log(6 * 7)'", "42"),
    Tool("node workers", f"echo '{WORKER}' > w.js; node w.js", "42"),
    Tool("java", "echo 'class M {public static void main(String[] a) {System.out.println(7);}}' > M.java; java M.java", "7"),
    Tool("python multiprocessing", _pool("fork"), "30"),
    Tool("python multiprocessing spawn", _pool("spawn"), "30", own=True),
    Tool(
        "python multiprocessing manager",
        "python -c 'import multiprocessing as m; print(*m.Manager().list([4]))'",
        "4",
        own=True,
    ),
    Tool("python multiprocessing shared_memory", f"python -c '{SHARED}'", "9", own=True),
    Tool(
        "python concurrent.futures",
        "python -c 'from concurrent.futures import *; print(*ProcessPoolExecutor(2).map(abs, [-3]))'",
        "3",
    ),
    Tool("python sqlite3", 'python -c \'import sqlite3; print(*sqlite3.connect("p.db").execute("select 8").fetchone())\'', "8"),
    Tool("python venv", "python -m venv --without-pip v && v/bin/python -c 'print(2)'", "2"),
    Tool("git", "git init -q r; cd r; touch f; git add f; git -c user.name=n -c user.email=e commit -qm m; git ls-files", "f"),
    Tool("sqlite3", "sqlite3 s.db 'create table t(a); insert into t values(3); select a from t'", "3"),
    Tool("perl", "perl -e 'print 6 * 7'", "42"),
    Tool("ruby", "ruby -e 'puts 6 * 7'", "42"),
    Tool("go", "printf 'package main\\nfunc main(){println(42)}' > g.go; go run g.go", "42"),
    Tool("awk", "echo 4 2 | awk '{print $2}'", "2"),
    Tool("sed", "echo a | sed s/a/b/", "b"),
    Tool("jq", "echo '{\"a\": 1}' | jq .a", "1"),
    Tool("tar", "echo t > t; tar czf t.tgz t && rm t && tar xzf t.tgz && cat t", "t"),
    Tool("zip", "echo z > z; zip -q z.zip z && rm z && unzip -q z.zip && cat z", "z"),
    Tool("xz", "echo x | xz | xz -d", "x"),
    Tool("bc", "echo 6*7 | bc", "42"),
    Tool("xargs", "seq 4 | xargs -P2 -n1 echo | wc -l", "4"),
    Tool("sort", "seq 9 | sort -rn --parallel=2 | head -1", "9"),
    Tool("patch", "echo a > p; echo b > q; diff -u p q | patch -s p; cat p", "b"),
    Tool("vim", "echo x > v; vim -es -c s/x/y/ -c wq v; cat v", "y"),
    Tool("gdb", "gdb -batch -ex 'print 1'", "$1 = 1"),
    Tool("openssl", "echo x | openssl dgst -sha256 | wc -c", "82"),
    Tool("curl", "echo c > c.txt; curl -s file://$PWD/c.txt", "c"),
    Tool("gpg", "echo g > g; gpg -q --batch --passphrase p -c g; gpg -q --batch --passphrase p -d g.gpg", "g", own=True),
    Tool("flock", "flock lock echo held", "held"),
    Tool("timeout", "timeout 0.1 sleep 5; echo $?", "124"),
)


async def outcomes(agent: ShellAgent) -> dict[str, str]:
    """Returns name → an ``Outcome``, or the output of one that fails. Raises what ``opened`` raises, and ``SandboxFailed``."""
    assert isinstance(agent.sandboxes, Contained)
    level = await agent.sandboxes.level()
    return {tool.name: await _outcome(agent, tool, level, agent.sandboxes.python) for tool in TOOLS}


async def _outcome(agent: ShellAgent, tool: Tool, level: Level, python: str) -> str:
    if tool.own and level != "A":
        return "needs a file system of its own"
    shell = await agent.opened(Work())
    try:
        return await _tried(shell, tool, python)
    finally:
        await shell.close()


async def _tried(shell: Sandbox, tool: Tool, python: str) -> str:
    program = tool.name.split()[0]
    if program == "python":
        await shell.run(f"python() {{ '{python}' \"$@\"; }}; export -f python", DEADLINE_S)
    elif (await shell.run(f"command -v '{program}'", DEADLINE_S)).code != 0:
        return "not installed"
    ran = await shell.run(tool.command, DEADLINE_S)
    lines = ran.output.split("\n")
    told = [line.strip() for line in lines if line.strip()]
    if ran.why == "ended" and told and told[-1] == tool.tells:
        return "works"
    return f"{ran.why}, exit code {ran.code}: {' | '.join(told)[-300:]}"


def main() -> None:
    about = argparse.ArgumentParser(prog="python -m rlhf_plugin_shell.tools", description="Tries ordinary tools in a shell.")
    about.add_argument("--python", help="interpreter that commands may read; default: as code_exec")
    given = about.parse_args()
    try:
        told = asyncio.run(outcomes(ShellAgent(ShellAgent.Options(python=given.python, timeout_s=DEADLINE_S))))
    except (UserError, EpisodeFailed, SandboxFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    for name, outcome in told.items():
        print(f"{name}: {outcome}")
    sys.exit(0 if set(told.values()) <= set(Outcome.__args__) else 1)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
