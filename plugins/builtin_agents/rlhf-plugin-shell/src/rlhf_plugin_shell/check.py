"""Checks tasks in directories: the reward of each one's own solution is 1, and that of no work is less.

    python -m rlhf_plugin_shell.check DIRECTORY [--environment host]
    python -m rlhf_plugin_shell.check DIRECTORY --environment container [--sandbox podman] [--network]
    python -m rlhf_plugin_shell.check DIRECTORY --sandbox e2b [--network]

The exit code is 1 if a task fails this, or cannot be played here.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import get_args

from pydantic import ValidationError

from rlhf_host import EpisodeFailed, UserError
from rlhf_plugin_shell.agent import ShellAgent
from rlhf_plugin_shell.directory import SOLVE, Place, in_one_line, instruction_in, solution_in, work_in
from rlhf_plugin_shell.harbor import task_folders
from rlhf_plugin_shell.outputs import told
from rlhf_plugin_shell.sandboxed import CONTAINED
from rlhf_plugin_shell.sandboxes import Ran, SandboxFailed
from rlhf_plugin_shell.verdicts import Verdict

DEADLINE_S = 600.0
"""Seconds for a task's solution, and most for its setup and its tests."""


async def problem_of(agent: ShellAgent, folder: Path, environment: Place) -> str:
    """Returns what is wrong with a task, or nothing."""
    try:
        instruction_in(folder)
        work = work_in(folder, environment)
        files, variables = solution_in(folder)
    except (ValueError, OSError) as error:
        return f"not played: {in_one_line(error)}"
    if reason := agent.sandboxes.misfit(work):
        return f"not played: {reason}"
    work_s, tests_s = work.seconds or DEADLINE_S, min(work.tests_s or DEADLINE_S, agent.options.tests_timeout_s)

    async def played(solved: bool) -> tuple[Ran | None, Ran, Verdict]:
        shell = await agent.opened(work)
        try:
            solving = None
            if solved:
                await shell.put(files, "solution")
                own = {**work.variables, **variables}
                solving = await shell.run(f'"$SOLUTION_DIR/{SOLVE}"', work_s, sees=("solution",), variables=own)
            return (solving, *await agent.judged(shell, work))
        finally:
            await shell.close()

    try:
        solving, tests, solved = await played(True)
        _, _, idle = await played(False)
    except (EpisodeFailed, SandboxFailed) as failure:
        return f"not played: {failure}"
    if solved.reward != 1.0:
        lines = [f"its solution gets {solved.reward:g}" + (f": {solved.problem}" if solved.problem else "")]
        lines += [f"solution: {told(solving, work_s, 600)}"] if solving else []
        return "\n".join([*lines, f"tests: {told(tests, tests_s, 600)}"])
    if idle.reward >= 1.0:
        return f"no work gets {idle.reward:g}"
    return ""


async def check(path: str, environment: Place, agent: ShellAgent) -> int:
    """Checks all tasks, and prints a line for each. Returns how many fail. Raises ``UserError``."""
    failed = 0
    try:
        for folder in task_folders(path, "DIRECTORY"):
            problem = await problem_of(agent, folder, environment)
            print(f"{folder.name}: {problem or 'good'}")
            failed += bool(problem)
    finally:
        await agent.sandboxes.close()
    return failed


def main() -> None:
    about = argparse.ArgumentParser(prog="python -m rlhf_plugin_shell.check", description="Checks tasks in Harbor's format.")
    about.add_argument("directory")
    about.add_argument("--environment", choices=get_args(Place), default="plain")
    about.add_argument("--sandbox", help="where tasks are played; default: docker for container, else contained")
    about.add_argument(
        "--network", action="store_true", help="in a container or machine: tasks that ask for a network have one"
    )
    given = about.parse_args()
    limits = {"tests_timeout_s": DEADLINE_S, "setup_timeout_s": DEADLINE_S}
    sandbox = given.sandbox or ("docker" if given.environment == "container" else CONTAINED)
    try:
        options = ShellAgent.Options(sandbox=sandbox, sandbox_options={"network": True} if given.network else {}, **limits)
        sys.exit(1 if asyncio.run(check(given.directory, given.environment, ShellAgent(options))) else 0)
    except ValidationError as error:
        print(f"error: {error.errors()[0]['msg'].removeprefix('Value error, ')}", file=sys.stderr)
        sys.exit(2)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
