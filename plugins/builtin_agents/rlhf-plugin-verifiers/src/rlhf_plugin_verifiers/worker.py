"""Program that plays episodes of an environment of verifiers: requests on standard input, answers on standard output, each a
line of JSON.

The first line names the environment. The end of standard input is the end of this program and of all that it started. It runs
with a Python that has verifiers, and needs nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import ctypes
import itertools
import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class Wrong(Exception):
    """An error that the user must fix."""


def load(environment: str, args: dict[str, Any]) -> Any:
    """Returns the environment. Its agents chat in processes of this machine, unless it or ``args`` say otherwise."""
    try:
        import verifiers.v1 as vf
    except ImportError as error:
        raise Wrong(f"verifiers cannot be imported there: {error}") from error
    if environment.endswith(".py"):
        path = Path(environment).resolve()
        sys.path.insert(0, str(path.parent))
        os.environ["PYTHONPATH"] = str(path.parent)  # tools are servers of their own
        environment = path.stem
    settings = {**args, "taskset": {**args.get("taskset", {}), "id": environment}}
    kind = vf.env_config_type(environment, settings.get("id", ""))
    agents = {name: field.default for name, field in kind.model_fields.items() if isinstance(field.default, vf.AgentConfig)}
    for name, default in agents.items():
        agent = settings[name] = dict(settings.get(name) or {})
        pinned = agent.keys() | default.model_fields_set
        if "harness" not in pinned and vf.default_agent_harness(environment).id == "bash":
            agent["harness"] = {"id": "null"}  # which chats; the other is what verifiers falls back to
        if "runtime" not in pinned:
            agent["runtime"] = {"type": "subprocess"}
            harness = getattr(kind.model_validate(settings), name).harness or vf.default_agent_harness(environment)
            if vf.load_harness(harness).EXECUTES_CODE:
                raise Wrong(
                    f"the harness {harness.id} of {name!r} runs what the policy writes: say where, as in"
                    f' --agent.args \'{{"{name}": {{"runtime": {{"type": "docker"}}}}}}\''
                )
    return vf.load_environment(kind.model_validate(settings))


def tasks(env: Any, skip: int, size: int | None) -> list[dict[str, Any]]:
    if size is None and not env.taskset.bounded:
        raise Wrong("its tasks have no end: give --data.verifiers.size")
    stop = None if size is None else skip + size
    return [task.data.model_dump(mode="json") for task in itertools.islice(env.taskset, skip, stop)]


async def play(env: Any, data: dict[str, Any], base_url: str) -> dict[str, Any]:
    import verifiers.v1 as vf

    kind = type(env.taskset).task_type()
    task = kind(kind.data_type().model_validate(data), env.config.taskset.task)
    one = copy.copy(env)
    one._interception = None  # a shared one would keep a client for every episode's URL
    client = vf.EvalClientConfig(base_url=base_url, api_key_var="RLHF_NONE")  # the URL names the episode
    return report(await one.run_episode(task, vf.ModelContext(model="policy", client=client)), base_url)


def report(episode: Any, base_url: str) -> dict[str, Any]:
    seats = [(trace, trace.agent.config.client.base_url == base_url) for trace in episode.traces]
    told: dict[str, Any] = {
        "ok": episode.ok,
        "agents": [[trace.agent.name, trace.agent.trainable] for trace, policy in seats if policy],
    }
    errors = [*episode.errors, *(trace.last_error for trace in episode.traces if not trace.ok)]
    if errors := [error for error in errors if error is not None]:
        told["error"] = {"type": errors[0].type, "message": errors[0].message, "status": errors[0].status_code}
    if episode.is_timeout or any(trace.is_timeout for trace in episode.traces):
        told["late"] = next((trace.stop_condition for trace in episode.traces if trace.is_timeout), "episode")
    for trace, policy in seats:
        if policy:
            told["rewards"] = {name: one and one.value for name, one in trace.rewards.items()}
            told["parts"] = {name: one and [one.score, one.weight] for name, one in trace.rewards.items()}
            told["metrics"] = dict(trace.metrics)
            told |= {"turns": trace.num_turns, "truncated": trace.is_truncated, "stop": trace.stop_condition}
    return told


def problem(error: BaseException) -> dict[str, Any]:
    return {"type": type(error).__name__, "message": str(error), "wrong": isinstance(error, Wrong)}


async def serve(lines: asyncio.StreamReader, answer: Any) -> None:
    first = json.loads(await lines.readline())
    async with contextlib.AsyncExitStack() as stack:
        try:
            env = load(first["environment"], first["args"])
            if first["op"] == "tasks":
                return answer(0, ok=tasks(env, first["skip"], first["size"]))
            await stack.enter_async_context(env.serving())
        except (Exception, SystemExit) as error:
            return answer(0, error=problem(error))
        answer(0, ok={})
        running: dict[int, asyncio.Task[None]] = {}

        async def run(number: int, request: dict[str, Any]) -> None:
            try:
                answer(number, ok=await play(env, **request))
            except (Exception, SystemExit, asyncio.CancelledError) as error:
                answer(number, error=problem(error))
            finally:
                del running[number]

        try:
            while line := await lines.readline():
                request = json.loads(line)
                number = request.pop("id")
                if request.pop("op") == "play":
                    running[number] = asyncio.create_task(run(number, request))
                elif number in running:
                    running[number].cancel()
        finally:
            for task in list(running.values()):
                task.cancel()
            await asyncio.gather(*running.values(), return_exceptions=True)


async def main() -> None:
    # What an environment prints, or its children do, is no answer of ours.
    given, out = os.dup(0), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)

    def answer(number: int, **told: Any) -> None:
        out.write(json.dumps({"id": number, **told}, default=str).encode() + b"\n")
        out.flush()

    lines = asyncio.StreamReader(limit=64 << 20)
    pipe = os.fdopen(given, "rb")
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), pipe)
    await serve(lines, answer)


def descendants(pid: int) -> list[int]:
    """Returns the descendants; nothing if there is no ``/proc``."""
    try:
        children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return [one for child in children for one in (child, *descendants(child))]


def watch(child: int) -> int:
    """Waits for the worker, and ends everything that it leaves behind, in any session."""
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
    code = None
    while code is None:
        pid, status = os.wait()
        code = os.waitstatus_to_exitcode(status) if pid == child else None
    with contextlib.suppress(ChildProcessError):
        while True:
            for pid in descendants(os.getpid()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            os.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    system = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    if system is not None:
        system.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    watcher = os.getpid()
    if child := os.fork():
        if system is not None:
            system.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # a busy worker does not see the end of its input
        os.close(0)
        os.close(1)
        os._exit(watch(child))
    if system is not None:
        system.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != watcher:  # it was gone before
            os._exit(1)
    logging.basicConfig(level=logging.WARNING)
    asyncio.run(main())
